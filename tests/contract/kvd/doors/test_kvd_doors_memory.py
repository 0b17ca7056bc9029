"""What comes in by the memory socket and is wrong is refused there, named, and harms nobody else."""

import asyncio
import fcntl
import os
import socket
import struct
import tempfile
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from pdserve.kvd import memory, memory_wire
from pdserve.kvd.__main__ import parse
from pdserve.kvd.callers import allowed, user_of
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.memory_wire import RegisterReply
from pdserve.kvd.server import serving
from pdserve.kvd.testing import RunningKvd, plain_layout
from pdserve.kvd.types import Layout, Span
from tests.contract.kvd.doors.works import works

LAYOUT = plain_layout(4, layers=1)
SIZE = 4 * 4096


def _memfd(size: int = SIZE) -> int:
    fd = os.memfd_create("door", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


async def _register(kvd: RunningKvd, data: bytes, fds: list[int]) -> tuple[RegisterReply, socket.socket]:
    """Sends raw bytes and descriptors to the memory socket; the answer, and the open connection."""
    sock = await asyncio.to_thread(memory_wire.connect, str(kvd.config.memory_socket), 5.0)
    socket.send_fds(sock, [data], fds)
    return await asyncio.to_thread(memory_wire.receive_reply, sock), sock


def _message(**changes: object) -> bytes:
    whole = {"engine_id": "e", "rank": 0, "size": SIZE, "kind": "host", "layout": LAYOUT, **changes}
    return msgspec.msgpack.encode(whole)


BAD_MEMORY = {
    "junk": (b"junk", "not a region"),
    "nil": (b"\xc0", "not a region"),
    "unknown kind": (_message(kind="paper"), "not a region"),
    "negative rank": (_message(rank=-1), "rank"),
    "device memory": (_message(kind="cuda"), "host memory"),
    "larger than the file": (_message(size=SIZE * 2), "in a file of"),
    "empty": (_message(size=0), "in a file of"),
    "much smaller than the file": (_message(size=SIZE // 2), "in a file of"),
    "too small for its layout": (_message(layout=plain_layout(8, layers=1)), "leaves its region"),
    "too many blocks": (_message(layout=Layout(16, 1 << 40, ((Span(0, 1, 1),),))), "leaves its region"),
    "no layers": (_message(layout=Layout(16, 0, ())), "at least one"),
}


@pytest.mark.parametrize(("data", "told"), BAD_MEMORY.values(), ids=BAD_MEMORY)
async def test_memory_that_cannot_be_is_refused(kvd: RunningKvd, data: bytes, told: str) -> None:
    """Garbage, negative rank, device memory, sizes and layouts that do not fit: told why, nothing mapped."""
    fd = _memfd()
    reply, sock = await _register(kvd, data, [fd])
    assert not reply.ok
    assert reply.reason == "INVALID_REQUEST"
    assert told in reply.error
    assert not kvd.node.mapped
    sock.close()
    os.close(fd)
    assert await works(kvd)


@pytest.mark.parametrize("count", [0, 2])
async def test_a_region_comes_with_one_descriptor(kvd: RunningKvd, count: int) -> None:
    """None or two: refused, and kvd keeps none of them open."""
    before = len(os.listdir("/proc/self/fd"))
    fds = [_memfd() for _ in range(count)]
    reply, sock = await _register(kvd, _message(), fds)
    assert "one descriptor" in reply.error
    sock.close()
    for fd in fds:
        os.close(fd)
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


async def test_a_pipe_is_no_memory(kvd: RunningKvd) -> None:
    """A descriptor of another kind is refused before it is mapped."""
    read, write = os.pipe()
    reply, sock = await _register(kvd, _message(), [read])
    assert "memfd" in reply.error
    sock.close()
    os.close(read)
    os.close(write)


async def test_memory_is_sealed_against_shrinking(kvd: RunningKvd) -> None:
    """A file that shrank under the mapping would kill the daemon: a memfd that allows it is sealed."""
    fd = _memfd()
    reply, sock = await _register(kvd, _message(), [fd])
    assert reply.ok
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    sock.close()
    os.close(fd)


async def test_a_memfd_that_cannot_be_sealed_is_refused(kvd: RunningKvd) -> None:
    """One that was made without leave for seals could shrink under the daemon; told how to make it."""
    fd = os.memfd_create("door")
    os.ftruncate(fd, SIZE)
    reply, sock = await _register(kvd, _message(), [fd])
    assert (reply.ok, reply.reason) == (False, "INVALID_REQUEST")
    assert "MFD_ALLOW_SEALING" in reply.error
    assert not kvd.node.mapped
    sock.close()
    os.close(fd)
    assert await works(kvd)


async def test_a_memfd_that_its_maker_has_sealed_for_good_is_taken(kvd: RunningKvd) -> None:
    """As our engines do: no further seal can be added, and none is needed."""
    fd = _memfd()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    reply, sock = await _register(kvd, _message(), [fd])
    assert reply.ok, reply.error
    sock.close()
    os.close(fd)


async def test_a_file_of_somebody_elses_making_is_trusted_not_to_shrink(kvd: RunningKvd) -> None:
    """Shared memory that has no seals is not of our engines; it is taken, and that is logged."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file, capture_logs() as logs:
        file.truncate(SIZE)
        reply, sock = await _register(kvd, _message(), [file.fileno()])
        assert reply.ok, reply.error
        assert [entry for entry in logs if entry["event"] == "region_not_sealed"]
        sock.close()
        await kvd.node.until(lambda: not kvd.node.mapped, 5.0)


async def test_memory_of_another_user_is_refused(kvd: RunningKvd, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's word on who has connected, before anything of it is read."""
    others = os.geteuid() + 1
    monkeypatch.setattr(memory, "user_of", lambda _: others)
    fd = _memfd()
    reply, sock = await _register(kvd, _message(), [fd])
    assert (reply.ok, reply.reason) == (False, "UNAUTHENTICATED")
    assert f"user {others} may not" in reply.error
    assert await asyncio.to_thread(sock.recv, 10) == b""
    sock.close()
    os.close(fd)
    assert not kvd.node.mapped
    monkeypatch.undo()
    assert await works(kvd)


async def test_further_users_may_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --allow-uid; root and the daemon's own user always are."""
    others = os.geteuid() + 1
    monkeypatch.setattr(memory, "user_of", lambda _: others)
    config, _ = parse(["--state-dir", str(tmp_path), "--allow-uid", str(others), "--allow-uid", "77"])
    assert allowed(config.allow_uid) == {0, os.geteuid(), others, 77}
    async with serving(config) as node:
        fd = _memfd()
        reply, sock = await _register(RunningKvd(node, config), _message(), [fd])
        assert reply.ok, reply.error
        sock.close()
        os.close(fd)


def test_the_kernel_says_who_has_connected() -> None:
    """Of both ends of a pair: this process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert user_of(ours) == user_of(theirs) == os.geteuid()


async def test_a_connection_that_talks_on_is_ended(kvd: RunningKvd) -> None:
    """After its region a connection only lives: another message counts as its end."""
    fd = _memfd()
    reply, sock = await _register(kvd, _message(), [fd])
    assert reply.ok
    sock.send(b"more")
    await kvd.node.until(lambda: not kvd.node.mapped, 5.0)
    assert await asyncio.to_thread(sock.recv, 10) == b""
    sock.close()
    os.close(fd)


async def test_a_silent_connection_is_dropped(tmp_path: Path) -> None:
    """Who connects and says nothing is disconnected after the timeout."""
    async with serving(KvdConfig(tmp_path, hello_timeout=0.1)) as node:
        sock = await asyncio.to_thread(memory_wire.connect, str(node.config.memory_socket), 5.0)
        assert await asyncio.to_thread(sock.recv, 10) == b""
        sock.close()


async def test_a_connection_that_is_reset_is_a_death(kvd: RunningKvd) -> None:
    """A reset (unread data, linger 0) counts like an end: the memory goes."""
    fd = _memfd()
    reply, sock = await _register(kvd, _message(), [fd])
    assert reply.ok
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    os.close(fd)
    await kvd.node.until(lambda: not kvd.node.mapped, 5.0)
