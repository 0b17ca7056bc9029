"""What the sides of a stream between daemons need."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from pdserve.api.kvd.v1 import peer_pb2
from pdserve.kvd.peers.greeter import BEAT_S
from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.messages import Frame
from pdserve.rpc.errors import Unavailable

Call = grpc.aio.StreamStreamCall[peer_pb2.ConnectRequest, peer_pb2.ConnectResponse]
"""As the caller has it."""


async def next_answer(call: Call) -> peer_pb2.ConnectResponse | None:
    """What the other side says next; None after the last."""
    message: Any = await call.read()
    return None if message is grpc.aio.EOF else message


async def answer(call: Call) -> peer_pb2.ConnectResponse:
    """What it says before the link is open.

    Raises:
        Unavailable: nothing more.
    """
    if (message := await next_answer(call)) is None:
        raise Unavailable(f"the peer ended the stream before its welcome ({(await call.code()).name})")
    return message


async def next_frame(link: Link, stream: int) -> Frame:
    """The next frame for a stream; where there is none, one that says that this side lives.

    Raises:
        Unavailable: another stream has taken over, or the link is lost.
    """
    if (ready := link.frame(stream)) is not None:
        return ready
    try:
        async with asyncio.timeout(BEAT_S):
            return await link.next(stream)
    except TimeoutError:
        return link.beat(stream)


async def first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Until the first of them is over, and as that ended; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled():
            task.result()
