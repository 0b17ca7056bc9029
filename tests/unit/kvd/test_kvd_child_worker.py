"""The sockets between kvd and a process, or a thread of a rank, that a library lives in."""

import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest

from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.child_worker import Channel

HIGH = 1500


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may have more descriptors than `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 1), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("lowest", [0, HIGH], ids=["few descriptors", "many"])
def test_kvd_is_heard_whatever_descriptors_the_process_has(lowest: int, many_files: None) -> None:
    """An engine may have thousands; kvd's words come, and its end, and nothing is waited for longer than was said."""
    control, kvd = socket.socketpair()
    with control, kvd, socket.socket(fileno=fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, lowest)) as heard:
        channel = Channel(heard, control)  # no files come
        assert channel.hear(0.001) == ()
        kvd.sendall(wire.framed(wire.Cancel(3)))
        assert channel.hear(5.0) == [wire.Cancel(3)]
        assert channel.open
        kvd.close()
        assert channel.hear(None) == []
        assert not channel.open
