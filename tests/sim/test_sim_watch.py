"""`pdserve plan --watch` on a real proxy: what it makes of the metrics is what was sent. Simulated: the model."""

import asyncio
from collections.abc import Callable

import pytest

from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import metrics
from pdserve.planner.planning.present import layout
from tests.sim.fleet import Fleet
from tests.waiting import WAIT_S

PROMPT, ANSWER = 64, 6
WINDOW_S = 10.0


async def reading(fleet: Fleet, at: float) -> metrics.Reading:
    """The proxy's page, as of `at`, seconds."""
    async with fleet.http.get("/metrics") as response:
        assert response.status == 200
        return metrics.read(await response.text(), at)


async def test_window_is_what_was_sent(fleet: Fleet, prompt: Callable[[int], tuple[int, ...]]) -> None:
    """Before the window a request of other lengths. In it two in WRITE and one in READ that share a prompt, and one
    that has not ended: rate, lengths, the cached share, and what runs."""
    await fleet.ask(prompt(10), max_tokens=3)
    await fleet.settled(WAIT_S)
    first = await reading(fleet, 100.0)
    same = prompt(PROMPT)
    done = [await fleet.ask(same, mode=mode, max_tokens=ANSWER) for mode in ("write", "read", "write")]
    await fleet.settled(WAIT_S)
    fleet.decodes[0].steps.shut()
    going = asyncio.create_task(fleet.ask(prompt(PROMPT), max_tokens=ANSWER))
    await fleet.until(lambda: fleet.proxy.inference.topology().in_flight == 1)
    second = await reading(fleet, 100.0 + WINDOW_S)
    fleet.decodes[0].steps.open()
    await going

    found = metrics.workload(first, second)
    cached = sum(one.usage.cached_tokens for one in done)
    print(found, cached)
    assert (found.prompt, found.output) == (Span(PROMPT, PROMPT), Span(ANSWER, ANSWER))
    assert found.rate == pytest.approx(4 / WINDOW_S)
    assert cached > 0
    assert found.hit_rate == pytest.approx(cached / (3 * PROMPT))
    present = layout(second.engines, metrics.modes(first, second))
    assert present is not None
    assert present.label == "1P:1D WRITE"
