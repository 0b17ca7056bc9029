"""One Attach stream's parts: its greeting, what is read from it, and what is written to it."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.client import codec
from pdserve.kvd.client.messages import Accept, Begin, Cancel, End, Fenced, Hello, Offer, Request, Retract, Welcome
from pdserve.rpc.channel import CHANNEL_OPTIONS
from pdserve.rpc.errors import KvdUnavailable, PdserveError
from pdserve.runtime.failpoints import Point, passing

Call = grpc.aio.StreamStreamCall[kvd_pb2.AttachRequest, kvd_pb2.AttachResponse]

OPTIONS = [
    *CHANNEL_OPTIONS,
    # The pauses between attempts are ours; grpc's own would grow to minutes.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 500),
]

_POINTS = {
    Begin: Point.CONNECTOR_BEGIN,
    Offer: Point.CONNECTOR_OFFER,
    Accept: Point.CONNECTOR_ACCEPT,
}


async def greet(call: Call, hello: Hello, timeout: float) -> Welcome:
    """kvd's answer to a hello.

    Raises:
        KvdUnavailable: none within `timeout` seconds, or kvd has ended the stream.
        PdserveError: kvd said something else.
    """
    try:
        async with asyncio.timeout(timeout):
            await call.write(codec.encode_hello(hello))
            welcome = await read(call)
    except TimeoutError:
        raise KvdUnavailable(f"no welcome within {timeout:g} s") from None
    if welcome is None:
        # The status says why; without one kvd just went away.
        code = await call.code()
        raise KvdUnavailable(f"kvd ended the stream before its welcome ({code.name})")
    if not isinstance(welcome, Welcome):
        raise PdserveError(f"kvd answered a hello with {type(welcome).__name__}")
    return welcome


async def read(call: Call) -> Welcome | End | Fenced | None:
    """The next message; None at the end."""
    message: Any = await call.read()
    return None if message is grpc.aio.EOF else codec.decode(message)


async def over(reader: asyncio.Task[None], *others: asyncio.Task[None]) -> None:
    """Returns or raises as the reader does, or raises the failure of another part that comes before it."""
    running = {reader, *others}
    while not reader.done():
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for part in done - {reader}:
            if not part.cancelled():  # as grpc ends a write of a call that was cancelled; and the reader, soon
                part.result()
    if reader.cancelled():
        raise KvdUnavailable("the stream was cancelled")
    reader.result()


class Outbox:
    """What is still to be sent, in order. It outlives the streams that it is sent by."""

    def __init__(self) -> None:
        self._unsent: deque[Request] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Messages."""
        return len(self._unsent)

    def __contains__(self, message: object) -> bool:
        """Whether an equal one is still to be sent."""
        return message in self._unsent

    def put(self, messages: Iterable[Request]) -> None:
        """Adds them behind what there is."""
        self._unsent.extend(messages)
        self._filled.set()

    def begin_again(self, messages: Iterable[Request] = ()) -> None:
        """For another stream: these, and then of what there was only what gives something up, which a kvd that knows
        nothing of it may hear as well."""
        first = list(messages)
        partings = [m for m in self._unsent if isinstance(m, Cancel | Retract) and m not in first]
        self._unsent = deque([*first, *partings])
        self._filled.set()

    async def write(self, call: Call, unsendable: Callable[[Request, Exception], None]) -> None:
        """Sends what comes until the call is over; how it ended the reader hears. `unsendable` is told of a message
        that has no wire form."""
        while True:
            while self._unsent:
                message = self._unsent.popleft()
                try:
                    wire = codec.encode(message)
                except (TypeError, ValueError) as error:  # a number that the field cannot hold
                    unsendable(message, error)
                    continue
                try:
                    point = _POINTS.get(type(message))
                    for arriving in (wire,) if point is None else await passing(point, wire):
                        await call.write(arriving)
                except BaseException as error:
                    self._unsent.appendleft(message)
                    # InvalidStateError: it was over before the write.
                    if isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError) and call.done():
                        return
                    raise
            self._filled.clear()
            await self._filled.wait()
