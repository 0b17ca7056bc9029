"""The fleet that serves the cases, the engine that is compared with, and the line that a run ends with."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.port import Request, Sampling
from pdserve.engine.sim import SimEngine
from tests.forked.forks import Zygote
from tests.matrix import settings
from tests.matrix.case import Alone
from tests.matrix.fleet import Fleet, running
from tests.matrix.played import Played
from tests.matrix.processes import KIND


class Fleets:
    """One fleet for many cases; a new one after a case that left it in disorder."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._stack: AsyncExitStack | None = None
        self._fleet: Fleet | None = None

    async def get(self) -> Fleet:
        """The fleet, whole."""
        if self._fleet is None:
            self._stack = AsyncExitStack()
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="matrix"))
            self._fleet = await self._stack.enter_async_context(running(self._zygote, Path(folder)))
        return self._fleet

    async def drop(self) -> None:
        """Kills the fleet, if there is one."""
        stack, self._stack, self._fleet = self._stack, None, None
        if stack is not None:
            await stack.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def zygote() -> AsyncIterator[Zygote]:
    """Of all fleets."""
    made = Zygote(KIND)
    yield made
    made.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleets(zygote: Zygote) -> AsyncIterator[Fleets]:
    """Of the whole run, or of one of its workers."""
    made = Fleets(zygote)
    yield made
    await made.drop()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """A whole fleet, which is healed after the test. One that cannot be fails the test and is not used again."""
    fleet = await fleets.get()
    yield fleet
    try:
        await fleet.heal()
    except BaseException:
        await fleets.drop()
        raise


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def alone() -> AsyncIterator[Alone]:
    """Answers of one engine that knows of no hand-over."""
    engine = await SimEngine.start(settings.SIM.with_(num_blocks=4096, prefix_cache=False), None)
    numbers = iter(range(1 << 30))

    async def answer(prompt: Sequence[int]) -> tuple[int, ...]:
        sampling = Sampling(max_tokens=settings.ANSWER, temperature=0.0)
        request = Request(f"alone-{next(numbers)}", tuple(prompt), sampling)
        return tuple([token async for output in engine.generate(request) for token in output.token_ids])

    yield answer
    await engine.aclose()


def pytest_configure(config: pytest.Config) -> None:
    """Counts what is played, where the run has one place that hears of all of it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Played(), "matrix played")
