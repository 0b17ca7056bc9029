"""Shipped test doubles: the proxy's registration socket by hand, and a sleep that can be held."""

import asyncio
import collections

import zmq
import zmq.asyncio

from pdserve.runtime import beats
from pdserve.runtime.beats import Beat, Foreign, Reply
from pdserve.runtime.signing import Signer


class FakeProxy:
    """A ROUTER socket that takes beats and answers when it is told to. Made inside a loop."""

    def __init__(self, signer: Signer, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self._signer = signer
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def address(self) -> str:
        """`host:port`, as --proxy takes it."""
        return self.endpoint.removeprefix("tcp://")

    async def take(self, now: float, timeout: float = 20.0) -> tuple[bytes, Beat]:
        """The next beat and who sent it; `now` in unix seconds."""
        async with asyncio.timeout(timeout):
            peer, frame = await self.socket.recv_multipart()
        beat = beats.decode(frame, self._signer, now)
        if isinstance(beat, Foreign):
            raise AssertionError(f"a stock instance registered: {beat}")
        return peer, beat

    async def answer(self, reply: Reply, now: float, timeout: float = 20.0) -> Beat:
        """Answers the next beat, and returns it."""
        peer, beat = await self.take(now, timeout)
        await self.socket.send_multipart([peer, beats.encode_reply(reply)])
        return beat

    def close(self) -> None:
        """Goes away; safe twice."""
        self.socket.close()
        self._context.term()


class Gate:
    """A sleep with a gate behind it: while it is shut, whoever comes waits there.

    Give `sleep` to what takes one (a simulated engine, a simulated link), and a test can stop it at
    a point that it names. Made inside a loop.
    """

    def __init__(self, timeout: float = 20.0) -> None:
        """`timeout`: longest wait of `reached`, seconds."""
        self._timeout = timeout
        self._shut = False
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._came = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """In place of asyncio.sleep."""
        await asyncio.sleep(seconds)
        if not self._shut:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._came.set()
        try:
            await waiter
        finally:
            if waiter in self._waiters:  # cancelled where it waited
                self._waiters.remove(waiter)
                self._update()

    def shut(self) -> None:
        """Nobody passes any more."""
        self._shut = True

    def open(self) -> None:
        """Everybody passes."""
        self._shut = False
        while self._waiters:
            self._waiters.popleft().set_result(None)
        self._update()

    async def reached(self) -> None:
        """Returns once somebody waits at the gate; raises TimeoutError where nobody comes."""
        async with asyncio.timeout(self._timeout):
            await self._came.wait()

    async def pass_one(self, times: int = 1) -> None:
        """Lets as many pass, one after another; the gate stays shut."""
        for _ in range(times):
            await self.reached()
            self._waiters.popleft().set_result(None)
            self._update()

    def _update(self) -> None:
        if not self._waiters:
            self._came.clear()
