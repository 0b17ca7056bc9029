"""The fleet that serves the cases, the engine that is compared with, and the line that a run ends with."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.port import Request, Sampling
from pdserve.engine.sim import SimEngine
from tests.matrix import cells, settings
from tests.matrix.case import Alone
from tests.matrix.faults import Fault
from tests.matrix.fleet import Fleet, running
from tests.matrix.phases import Phase


class Fleets:
    """One fleet for many cases; a new one after a case that left it in disorder."""

    def __init__(self) -> None:
        self._stack: AsyncExitStack | None = None
        self._fleet: Fleet | None = None
        self.started = 0

    async def get(self) -> Fleet:
        """The fleet, whole."""
        if self._fleet is None:
            self._stack = AsyncExitStack()
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="matrix"))
            self._fleet = await self._stack.enter_async_context(running(Path(folder)))
            self.started += 1
        return self._fleet

    async def drop(self) -> None:
        """Kills the fleet, if there is one."""
        stack, self._stack, self._fleet = self._stack, None, None
        if stack is not None:
            await stack.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleets() -> AsyncIterator[Fleets]:
    """Of the whole run."""
    made = Fleets()
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The line that says how much of the matrix was played, and what of it held."""
    ends = {
        outcome: {
            report.nodeid
            for report in terminalreporter.stats.get(outcome, ())
            if "tests/matrix/test_matrix.py::test_cell" in report.nodeid
        }
        for outcome in ("passed", "failed", "error")  # an error: the fleet did not become whole before or after it
    }
    cases = len(set().union(*ends.values()))
    if not cases:
        return
    held = len(ends["passed"] - ends["failed"] - ends["error"])
    terminalreporter.write_line(
        f"matrix: {len(Phase)} phases x {len(Fault)} faults x {len(cells.MODES)} modes, {cases} cases, {held} held"
    )
    impossible = [why for cell in cells.every() if (why := cells.cannot(cell))]
    terminalreporter.write_line(f"matrix: {len(impossible)} cells cannot happen:")
    for why in dict.fromkeys(impossible):
        terminalreporter.write_line(f"  {impossible.count(why):4} {why}")
