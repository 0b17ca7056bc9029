"""What comes in by the notice socket: garbage, other users, and bursts."""

import asyncio
import os
from pathlib import Path

import pytest
import zmq

from pdserve.kvd.client import Begin
from pdserve.kvd.notice_socket import NoticeSocket
from pdserve.kvd.notices import Chunk, Notice, StepEnd, encode
from pdserve.kvd.testing import FakeEngine, RunningKvd, plain_layout
from pdserve.kvd.types import Mode


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
