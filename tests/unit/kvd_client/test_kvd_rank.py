"""The memory socket and the notices of a rank, against a hand-made other end."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pdserve.kvd import memory_wire, notices
from pdserve.kvd.client import Memory, NoticeSender, RegionClient
from pdserve.kvd.types import Layout, Span
from pdserve.rpc.errors import IncompatibleEngines, KvdUnavailable

LAYOUT = Layout(16, 4, ((Span(0, 64, 64),),))
READY = notices.LayerReady("engine", 0, 1, 2)


@pytest.fixture
def memory() -> Iterator[Memory]:
    """A small memfd."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 256)
    yield Memory(fd, 256, LAYOUT)
    os.close(fd)


class Daemon:
    """Takes one region and answers as told; keeps the connection."""

    def __init__(self, path: Path, reply: memory_wire.RegisterReply | None) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(5)
        self._reply = reply
        self.message: memory_wire.RegisterRegion | None = None
        self.first_byte = b""
        self.connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(5)
        data, fds, _, _ = socket.recv_fds(self.connection, memory_wire.MAX_MESSAGE_BYTES, 2)
        self.message = memory_wire.decode_region(data)
        self.first_byte = os.pread(fds[0], 1, 0)
        for fd in fds:
            os.close(fd)
        if self._reply is None:
            self.connection.close()
        else:
            self.connection.send(memory_wire.encode_reply(self._reply))

    def close(self) -> None:
        self._thread.join(5)
        self._listener.close()
        if self.connection is not None:
            self.connection.close()


def test_the_memory_arrives_and_the_connection_is_the_ranks_life(tmp_path: Path, memory: Memory) -> None:
    """kvd gets the layout and the very pages; it sees the end of the connection at `close`."""
    os.pwrite(memory.fd, b"x", 0)
    daemon = Daemon(tmp_path / "memory.sock", memory_wire.RegisterReply(ok=True))
    client = RegionClient("engine", 1, memory)
    client.register(daemon.path)
    assert daemon.message == memory_wire.RegisterRegion("engine", 1, 256, "host", LAYOUT)
    assert daemon.first_byte == b"x"
    assert daemon.connection is not None
    client.close()
    assert daemon.connection.recv(1) == b""
    daemon.close()


def test_a_refused_region_keeps_its_class(tmp_path: Path, memory: Memory) -> None:
    """kvd's reason comes back as the class of pdserve.rpc.errors."""
    reply = memory_wire.RegisterReply(ok=False, reason="INCOMPATIBLE_ENGINES", error="rank 1 has another layout")
    daemon = Daemon(tmp_path / "memory.sock", reply)
    client = RegionClient("engine", 1, memory)
    with pytest.raises(IncompatibleEngines, match="another layout"):
        client.register(daemon.path)
    client.close()
    daemon.close()


def test_a_kvd_that_hangs_up_or_is_not_there_is_unavailable(tmp_path: Path, memory: Memory) -> None:
    """No answer is KvdUnavailable, and the client can be used again."""
    daemon = Daemon(tmp_path / "memory.sock", None)
    client = RegionClient("engine", 0, memory)
    with pytest.raises(KvdUnavailable):
        client.register(daemon.path)
    daemon.close()
    with pytest.raises(KvdUnavailable):
        client.register(str(tmp_path / "none.sock"))
    good = Daemon(tmp_path / "again.sock", memory_wire.RegisterReply(ok=True))
    client.register(good.path)
    client.close()
    with pytest.raises(KvdUnavailable, match="has ended"):
        client.register(good.path)
    good.close()


def test_notices_arrive_and_never_block(tmp_path: Path) -> None:
    """Sent in order; beyond the high-water mark of a kvd that does not read they are dropped and counted."""
    context = zmq.Context()
    endpoint = f"ipc://{tmp_path}/notices.sock"
    sender = NoticeSender(context, high_water=3)
    assert not sender.send(READY)
    assert sender.dropped == 1
    pull = context.socket(zmq.PULL)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.RCVTIMEO, 5000)
    pull.bind(endpoint)
    sender.connect(endpoint)
    assert sender.send(READY)
    assert notices.decode(pull.recv()) == READY
    pull.close()
    sender.connect(f"ipc://{tmp_path}/nobody.sock")
    outcomes = [sender.send(READY) for _ in range(10)]
    assert outcomes.count(False) == 7
    assert sender.dropped == 8
    sender.close()
    sender.close()
    assert not sender.send(READY)
    context.destroy(linger=0)
