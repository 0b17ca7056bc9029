"""What comes in by the daemon's sockets and is wrong is refused there, named, and harms nobody else."""

import asyncio
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd import memory, memory_wire
from pdserve.kvd.__main__ import parse
from pdserve.kvd.callers import allowed, user_of
from pdserve.kvd.client import Accept, Begin, Hello, Offer, Outcome, Participant
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.memory_wire import RegisterReply
from pdserve.kvd.node import Node
from pdserve.kvd.notice_socket import NoticeSocket
from pdserve.kvd.notices import Chunk, Notice, StepEnd, encode
from pdserve.kvd.server import serving
from pdserve.kvd.testing import FakeEngine, RunningKvd, plain_layout, running_kvd
from pdserve.kvd.types import PROTOCOL, Layout, Mode, Span
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import ConfigError, Overloaded, PdserveError, StaleEpoch
from pdserve.rpc.status import to_error

LAYOUT = plain_layout(4, layers=1)
SIZE = 4 * 4096


@pytest.fixture
async def kvd() -> AsyncIterator[RunningKvd]:
    """A real daemon."""
    async with running_kvd(limits=None) as made:
        yield made


async def works(kvd: RunningKvd) -> bool:
    """Whether a hand-over still works."""
    async with FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
        landed = (await d.end_of("d")).outcome is Outcome.LANDED
        return landed and p.memory[0].prompt((1,)) == d.memory[0].prompt((2,))


# -- memory ---------------------------------------------------------------------------------


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


# -- notices --------------------------------------------------------------------------------


async def test_garbage_notices_are_counted_and_the_next_one_is_heard(kvd: RunningKvd) -> None:
    """Frames that are no notices, and notices of nobody, change nothing for the next good one."""
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(f"ipc://{kvd.config.notice_socket}")
    for frame in (b"", b"junk", b"\x93\xa5begin\xa1x\x00", os.urandom(1000)):
        push.send(frame)
    async with FakeEngine(kvd, seed=1) as p:
        tid = os.urandom(16)
        p.scheduler.send(Begin("p", tid, Mode.WRITE))
        p.step(1, Chunk("p", 0, 0, (3,), 1), Chunk("nobody", 0, 0, (4,), 1))
        await kvd.node.until(lambda: any(lease.block_ids == [3] for lease in kvd.node.leases), 5.0)
        await kvd.node.until(lambda: kvd.node.notices.malformed == 4, 5.0)
    push.close(0)
    context.term()


@pytest.mark.parametrize("ours", [True, False], ids=["own user", "another user"])
async def test_notices_are_heard_of_allowed_users_alone(tmp_path: Path, ours: bool) -> None:
    """What another user's process sends is not read, however often it connects."""
    heard: asyncio.Queue[Notice] = asyncio.Queue()
    door = NoticeSocket(tmp_path / "n", heard.put_nowait, {os.geteuid() if ours else os.geteuid() + 1})
    door.start()
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    try:
        push.connect(f"ipc://{tmp_path}/n")
        push.send(encode(StepEnd("e", 0, 1)), zmq.NOBLOCK)
        if ours:
            assert await asyncio.wait_for(heard.get(), 5.0) == StepEnd("e", 0, 1)
        else:
            await asyncio.sleep(0.5)  # there is no event of what is not heard
            assert heard.empty()
            assert not door.malformed
    finally:
        push.close(0)
        context.term()
        door.close()


async def test_more_notices_than_one_turn_takes_are_all_read(kvd: RunningKvd) -> None:
    """A burst longer than what is read at once is not left lying."""
    async with FakeEngine(kvd, layout=plain_layout(1000, 1, 64), seed=1) as p:
        p.scheduler.send(Begin("p", os.urandom(16), Mode.WRITE))
        for number in range(900):
            p.step(number, Chunk("p", 0, number, (number,), number + 1))
        await kvd.node.until(lambda: any(len(lease.block_ids) == 900 for lease in kvd.node.leases), 10.0)


# -- Attach ---------------------------------------------------------------------------------


async def _refusal(kvd: RunningKvd, *messages: kvd_pb2.AttachRequest) -> PdserveError:
    """The error that a stream with these messages ends with."""
    async with aio_channel(f"unix:{kvd.socket}") as channel:
        call = kvd_pb2_grpc.KvdStub(channel).Attach(iter(messages), timeout=5)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return to_error(error)
    raise AssertionError("the stream ended well")


def _hello(**changes: object) -> kvd_pb2.AttachRequest:
    whole = {
        "engine_id": "e",
        "participant": kvd_pb2.PARTICIPANT_SCHEDULER,
        "ranks": 1,
        "protocol": PROTOCOL,
        "pid": 1,
        **changes,
    }
    return kvd_pb2.AttachRequest(hello=kvd_pb2.Hello(**whole))  # type: ignore[arg-type]  # fields by name


BEGIN = kvd_pb2.AttachRequest(
    begin=kvd_pb2.Begin(handle="h", transfer_id=bytes(16), mode=common_pb2.TRANSFER_MODE_WRITE, consumers=1)
)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "INVALID_REQUEST"),
        ([BEGIN], "INVALID_REQUEST"),
        ([kvd_pb2.AttachRequest()], "INVALID_REQUEST"),
        ([_hello(participant=kvd_pb2.PARTICIPANT_UNSPECIFIED)], "INVALID_REQUEST"),
        ([_hello(engine_id="")], "INVALID_REQUEST"),
        ([_hello(ranks=0)], "INVALID_REQUEST"),
        ([_hello(participant=kvd_pb2.PARTICIPANT_WORKER, rank=1)], "INVALID_REQUEST"),
        ([_hello(protocol=PROTOCOL + 1)], "INCOMPATIBLE_ENGINES"),
        ([_hello(), _hello()], "INVALID_REQUEST"),
        ([_hello(), kvd_pb2.AttachRequest()], "INVALID_REQUEST"),
        ([_hello(), kvd_pb2.AttachRequest(begin=kvd_pb2.Begin(handle="h", transfer_id=bytes(16)))], "INVALID_REQUEST"),
        ([_hello(), kvd_pb2.AttachRequest(cancel=kvd_pb2.Cancel(transfer_id=b"x"))], "INVALID_REQUEST"),
        (
            [_hello(), kvd_pb2.AttachRequest(begin=kvd_pb2.Begin(mode=common_pb2.TRANSFER_MODE_READ))],
            "INVALID_REQUEST",
        ),
    ],
)
async def test_streams_that_make_no_sense_end_with_a_reason(
    kvd: RunningKvd, messages: list[kvd_pb2.AttachRequest], reason: str
) -> None:
    """No hello, a wrong one, a second one, an empty message, one without mode, handle or id."""
    assert (await _refusal(kvd, *messages)).reason == reason
    assert await works(kvd)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", PREFACE, PREFACE + b"\xff" * 4096], ids=range(5)
)
async def test_bytes_that_are_no_grpc_harm_nobody(kvd: RunningKvd, data: bytes) -> None:
    """Nothing, noise, another protocol, and noise behind a right beginning: the engines of others go on."""
    _, writer = await asyncio.open_unix_connection(kvd.socket)
    writer.write(data)
    await writer.drain()
    assert await works(kvd)
    writer.transport.abort()
    assert await works(kvd)
    assert kvd.node.defects == 0


async def test_who_does_not_read_is_bounded_and_its_engine_ended(tmp_path: Path) -> None:
    """More waits for a participant than the bound: its epoch ends, its memory is dropped, and its
    stream ends with OVERLOADED once it reads on. (A stream that nobody reads stands for it.)"""
    async with serving(KvdConfig(tmp_path, max_backlog=20)) as node:
        member, stream, _ = node.attach(Hello("e", Participant.SCHEDULER, {}), os.getpid())
        for number in range(21):
            node.handle("e", Accept(f"h{number}", bytes(16), 0, (1,), 0))
        assert not list(node.registry)
        with pytest.raises(Overloaded):
            await member.next(stream)
        with pytest.raises(StaleEpoch):
            node.handle("e", Accept("late", bytes(16), 0, (1,), 0))
        node.detach(member, stream)
        assert node.attachments.engines == 0
        assert node.defects == 0


async def test_a_second_process_cannot_be_the_same_participant(kvd: RunningKvd) -> None:
    """Another pid as the same living scheduler is refused; the first stream goes on."""
    async with FakeEngine(kvd) as engine:
        hello = _hello(engine_id=engine.engine_id, pid=os.getpid() + 1)
        hello.hello.identity.update(engine.identity)
        assert (await _refusal(kvd, hello)).reason == "INVALID_REQUEST"
        engine.scheduler.send(Begin("h", b"short", Mode.READ))
        assert (await engine.end_of("h")).reason == "INVALID_REQUEST"


async def test_an_ended_engine_cannot_attach_again(kvd: RunningKvd) -> None:
    """Its epoch is over with its memory: STALE_EPOCH."""
    async with FakeEngine(kvd) as engine:
        engine.rank[0].close()
        await kvd.node.until(lambda: not kvd.node.mapped, 5.0)
        assert (await _refusal(kvd, _hello(engine_id=engine.engine_id))).reason == "STALE_EPOCH"


async def test_engines_that_come_and_go_leave_nothing_behind(kvd: RunningKvd) -> None:
    """After 30 engines with transfers in every state: no entry, member, mapping, lease or descriptor is left."""
    fds = None
    for number in range(30):
        async with FakeEngine(kvd, seed=number) as engine:
            engine.scheduler.send(Begin("p", os.urandom(16), Mode.WRITE))
            engine.scheduler.send(Accept("c", os.urandom(16), 0, (5,), 0, peer_locator=engine.locator()))
            if number % 2:
                await asyncio.sleep(0.005)
        await kvd.node.until(lambda: not list(kvd.node.registry) and kvd.node.attachments.engines == 0, 5.0)
        if number == 5:
            fds = len(os.listdir("/proc/self/fd"))
    book = kvd.node.transfers.book
    assert [len(book.transfers), len(book.by_engine), len(book.steps), len(book.touched), len(book.handles)] == [0] * 5
    assert not kvd.node.mapped
    assert fds is not None
    assert len(os.listdir("/proc/self/fd")) <= fds + 3


# -- operator and start ---------------------------------------------------------------------


async def test_operators_see_what_is_held(kvd: RunningKvd) -> None:
    """Describe, ListTransfers and ListLeases show an open transfer; the four block states add up."""
    async with FakeEngine(kvd, seed=1) as p, aio_channel(f"unix:{kvd.socket}") as channel:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1, 2, 3), 48, Mode.READ))
        await kvd.node.until(lambda: len(kvd.node.leases) == 1, 5.0)
        stub = kvd_pb2_grpc.OperatorStub(channel)
        seen = await stub.Describe(kvd_pb2.DescribeRequest())
        (region,) = seen.regions
        assert (region.engine_id, region.kind, region.num_blocks) == (p.engine_id, "host", 64)
        assert (region.free, region.leased, region.in_flight, region.quarantined) == (61, 3, 0, 0)
        assert list(seen.transports) == ["shm"]
        assert seen.transfers["producer.complete"] == 1
        (transfer,) = (await stub.ListTransfers(kvd_pb2.ListTransfersRequest())).transfers
        assert (transfer.transfer_id, transfer.producer_engine_id) == (tid, p.engine_id)
        assert (transfer.producer_state, list(transfer.consumer_states)) == ("complete", [])
        (lease,) = (await stub.ListLeases(kvd_pb2.ListLeasesRequest())).leases
        assert (lease.engine_id, list(lease.block_ids), lease.quarantined) == (p.engine_id, [1, 2, 3], False)
        assert 0 < lease.remaining_seconds <= 30


async def test_drain_waits_for_what_is_open_and_takes_nothing_new(kvd: RunningKvd) -> None:
    """A deadline that passes counts what is left; what is open may still land; new transfers hear DRAINING."""
    async with FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d, aio_channel(f"unix:{kvd.socket}") as channel:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
        await kvd.node.until(lambda: len(kvd.node.leases) == 1, 5.0)
        stub = kvd_pb2_grpc.OperatorStub(channel)
        assert (await stub.Drain(kvd_pb2.DrainRequest(deadline_seconds=0.01))).remaining == 1
        draining = asyncio.create_task(_drain(stub))
        p.scheduler.send(Offer("new", os.urandom(16), 0, (2,), 16, Mode.READ))
        assert (await p.end_of("new")).reason == "DRAINING"
        assert not draining.done()
        d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
        assert await asyncio.wait_for(draining, 5) == 0
        assert (await d.end_of("d")).outcome is Outcome.LANDED


async def _drain(stub: "kvd_pb2_grpc.OperatorAsyncStub") -> int:
    return (await stub.Drain(kvd_pb2.DrainRequest(deadline_seconds=10))).remaining


async def test_two_daemons_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second is refused and the first goes on; a folder left by a dead one is taken over."""
    async with running_kvd(tmp_path) as kvd:
        with pytest.raises(ConfigError, match="another kvd"):
            async with serving(KvdConfig(tmp_path)):
                pass
        assert await works(kvd)
    for name in ("kvd.sock", "memory.sock", "notices.sock"):
        (tmp_path / name).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(tmp_path / name))
    async with running_kvd(tmp_path) as kvd:
        assert await works(kvd)


async def test_a_node_that_is_closed_twice_is_closed(tmp_path: Path) -> None:
    """Closing is safe twice, also of one that never started."""
    node = Node(KvdConfig(tmp_path))
    await node.aclose()
    await node.aclose()
