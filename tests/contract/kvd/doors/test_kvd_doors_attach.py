"""Attach streams that make no sense, do not read, or come and go: they end with a reason and harm nobody else."""

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd.client import Accept, Begin, Hello, Participant
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.server import serving
from pdserve.kvd.testing import FakeEngine, RunningKvd
from pdserve.kvd.types import PROTOCOL, Mode
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import Overloaded, PdserveError, StaleEpoch
from pdserve.rpc.status import to_error
from tests.contract.kvd.doors.works import works


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
