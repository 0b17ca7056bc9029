"""A real kvd in the test's process and simulated engines attached to it."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from pdserve.engine.port import Consume, Output, Produce, Request, Sampling
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.kvd.testing import RunningKvd, running_kvd
from pdserve.kvd.types import Locator, Mode, Ticket
from pdserve.runtime.signing import Kind

_numbers = itertools.count(1)

GREEDY = Sampling(max_tokens=8, temperature=0)
PREFILL = Sampling(max_tokens=1, temperature=0, ignore_eos=True)


def text(outputs: list[Output]) -> str:
    """The whole answer."""
    return "".join(output.text for output in outputs)


async def collect(engine: SimEngine, request: Request) -> list[Output]:
    """All outputs of a request."""
    return [output async for output in engine.generate(request)]


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Polls for what another task is about to do; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


class Gate:
    """An engine's sleep in the test's hands: each of its pauses waits to be let through."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)
        self._arrived = asyncio.Event()
        self._free = False

    async def sleep(self, seconds: float) -> None:
        """What the engine calls."""
        self._arrived.set()
        if not self._free:
            await self._permits.acquire()
        else:
            await asyncio.sleep(0)

    async def let(self, count: int) -> None:
        """Lets `count` pauses pass, one after another, and returns at the next one."""
        for _ in range(count):
            async with asyncio.timeout(20):
                await self._arrived.wait()
                self._arrived.clear()
                self._permits.release()
                await self._arrived.wait()

    def open(self) -> None:
        """Lets everything pass from now on."""
        self._free = True
        self._permits.release()


@dataclass
class Cluster:
    """One kvd and its engines, closed and checked at the end."""

    kvd: RunningKvd
    stack: AsyncExitStack
    engines: list[SimEngine] = field(default_factory=list)

    async def engine(self, config: SimConfig | None = None, **more: Any) -> SimEngine:
        """One more engine."""
        engine = await SimEngine.start(config or SimConfig(), self.kvd.socket, **more)
        self.stack.push_async_callback(engine.aclose)
        self.engines.append(engine)
        return engine

    async def idle(self) -> None:
        """Waits until no engine has a request, and checks that every block is free."""
        for engine in self.engines:
            await until(functools.partial(getattr, engine, "idle"))
            engine.integrity()
            load = engine.load()
            assert load.free_kv_tokens == load.total_kv_tokens

    def ticket(self, producer: SimEngine, transfer_id: bytes, tokens: int = 0) -> bytes:
        """What prefill's service signs."""
        payload = Ticket(producer.info.locator(self.kvd.socket), transfer_id, tokens, 0)
        return self.kvd.signer.sign(Kind.TICKET, msgspec.msgpack.encode(payload))

    def locator(self, producer: SimEngine) -> bytes:
        """What prefill's service registers."""
        return self.sign_locator(producer.info.locator(self.kvd.socket))

    def sign_locator(self, locator: Locator) -> bytes:
        """Any locator, signed as the cluster does."""
        return self.kvd.signer.sign(Kind.LOCATOR, msgspec.msgpack.encode(locator))

    def produce(self, prompt: list[int], mode: Mode, transfer_id: bytes, consumers: int = 1) -> Request:
        """A prefill leg."""
        kv = Produce(transfer_id, mode, consumers)
        return Request(f"p{next(_numbers)}", tuple(prompt), PREFILL, kv)

    def consume(
        self,
        producer: SimEngine,
        prompt: list[int],
        mode: Mode,
        transfer_id: bytes,
        *,
        consumer: int = 0,
        recompute: bool = False,
        sampling: Sampling = GREEDY,
    ) -> Request:
        """A decode leg."""
        ticket = self.ticket(producer, transfer_id) if mode is Mode.READ else b""
        locator = self.locator(producer) if mode is Mode.WRITE else b""
        kv = Consume(transfer_id, mode, consumer, ticket, locator, recompute)
        return Request(f"d{next(_numbers)}", tuple(prompt), sampling, kv)

    async def hand_over(
        self, producer: SimEngine, consumer: SimEngine, prompt: list[int], mode: Mode, **more: Any
    ) -> tuple[list[Output], list[Output]]:
        """One request over both legs, in the mode's order. Returns both legs' outputs."""
        tid = transfer_id()
        if mode is Mode.READ:
            made = await collect(producer, self.produce(prompt, mode, tid))
            return made, await collect(consumer, self.consume(producer, prompt, mode, tid, **more))
        return await both(
            collect(producer, self.produce(prompt, mode, tid)),
            collect(consumer, self.consume(producer, prompt, mode, tid, **more)),
        )


async def both(first: Awaitable[list[Output]], second: Awaitable[list[Output]]) -> tuple[list[Output], list[Output]]:
    """Runs two legs together."""
    one, two = await asyncio.gather(first, second)
    return one, two


def transfer_id() -> bytes:
    """A new one."""
    return next(_numbers).to_bytes(16)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A kvd that copies for real, without engines yet."""
    async with running_kvd() as kvd, AsyncExitStack() as stack:
        yield Cluster(kvd, stack)


@pytest.fixture
async def faulty() -> AsyncIterator[Cluster]:
    """A kvd with a simulated link that can be told to fail."""
    async with running_kvd(transport="sim", fence=0.3) as kvd, AsyncExitStack() as stack:
        yield Cluster(kvd, stack)


@pytest.fixture
def helpers() -> Any:
    """This module, which tests cannot import."""
    import sys

    return sys.modules[__name__]
