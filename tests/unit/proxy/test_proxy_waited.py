"""All the waits of one request for engines count against one bound, wherever in its life they are."""

import asyncio
import time
from typing import Any

import pytest

from pdserve.proxy.holding import Holding, Waited
from pdserve.proxy.testing import Rig
from pdserve.proxy.types import Ask, Mode, OnFailure, TokenIds
from pdserve.rpc.errors import Draining, NoEngines

LONG = 60.0
"""Seconds that no test waits for: where it would, pytest's timeout ends it."""


class Gate:
    """Something that is possible or not."""

    def __init__(self) -> None:
        self.open = False

    def __call__(self) -> str:
        """What a request waits for."""
        if not self.open:
            raise NoEngines("no engine", route="split")
        return "there"


async def test_a_second_wait_has_what_the_first_has_left() -> None:
    """Of 5 s, 4.99 are over: it ends after the rest. A third is refused at once. Another request has its own bound."""
    now = 100.0
    holding, gate, waited = Holding(lambda: now, length=8, timeout=5.0), Gate(), Waited()
    first = asyncio.create_task(holding.until(gate, 1000.0, waited))
    await asyncio.sleep(0)
    now += 4.99
    gate.open = True
    holding.look()
    assert await first == "there"
    assert waited.seconds == pytest.approx(4.99)
    gate.open = False
    other = asyncio.create_task(holding.until(gate, 1000.0, Waited()))
    async with asyncio.timeout(2.5):
        with pytest.raises(NoEngines, match="none came within 5 s, its earlier waits") as refused:
            await holding.until(gate, 1000.0, waited)
    assert refused.value.metadata["route"] == "split"
    waited.seconds = 5.0
    with pytest.raises(NoEngines, match="its earlier waits"):
        await holding.until(gate, 1000.0, waited)
    with pytest.raises(NoEngines, match="its earlier waits"):
        holding.check(gate, waited)
    assert len(holding) == 1
    assert not other.done()
    gate.open = True
    holding.look()
    assert await other == "there"


async def test_a_wait_that_is_cut_short_counts() -> None:
    """By the client, who may not be gone for good: it is the request's time all the same."""
    now = 100.0
    holding, waited = Holding(lambda: now, length=8, timeout=5.0), Waited()
    task = asyncio.create_task(holding.until(Gate(), 1000.0, waited))
    await asyncio.sleep(0)
    now += 2.0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert waited.seconds == pytest.approx(2.0)
    assert len(holding) == 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_engines_that_come_and_go_hold_no_request_for_ever(mode: Mode) -> None:
    """Each one drains as soon as it has the request, and each time the request waits for the next; once its waits are
    as long as one may be, it ends with what the last engine said, at once."""
    rig = Rig(hold_timeout=LONG, retries=100)
    job = rig.job(mode, on_failure=OnFailure.FAIL)
    run = rig.start(job)
    seen = 0.0
    for number in range(4):
        prefill = await rig.legs.nth_prefill(number)
        if number == 3:
            job.waited.seconds = LONG
        rig.leave(f"p{number}")
        prefill.fail(Draining(f"engine {number} stops"))
        if number < 3:
            await rig.queued(1)
            assert len(rig.admission.holding) == 1
            rig.join(f"p{number + 1}", "prefill")
            await rig.queued(0)
            assert job.waited.seconds > seen
            seen = job.waited.seconds
    with pytest.raises(Draining, match="engine 3 stops"):
        await run.task
    await rig.nothing_is_held()


async def test_who_has_waited_before_its_first_attempt_has_less_left(deploy: Any) -> None:
    """For its first engine, before there is a job, and for the other one of the pair: both are the job's, and it is
    refused once they are as long as one wait may be."""
    deployment = await deploy(hold_timeout=LONG)
    inference = deployment.app.inference
    preparing = asyncio.create_task(inference.prepare(Ask(prompt=TokenIds((1, 2))), 0))
    await deployment.until(lambda: inference.topology().queued == 1)
    await deployment.engine("prefill")
    await deployment.until(lambda: inference.topology().queued == 1)
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(0.05)
    went_on = asyncio.get_running_loop().time()
    decode = await deployment.engine("decode")
    job = await preparing
    assert job.waited.seconds >= went_on - began
    await decode.stop()
    await deployment.until(lambda: deployment.app.registry.get(decode.engine_id) is None)
    job.waited.seconds = LONG
    with pytest.raises(NoEngines, match="none came within 60 s, its earlier waits for engines included"):
        async for _ in inference.run(job):
            pass
    assert inference.topology().queued == 0


async def test_an_engine_that_comes_as_the_wait_ends_is_used() -> None:
    """Both in one turn of the loop, as on a busy machine: what was found is not lost."""
    holding, gate = Holding(time.monotonic, length=8, timeout=0.05), Gate()
    task = asyncio.create_task(holding.until(gate, 1e9, Waited()))
    await asyncio.sleep(0)
    at = time.monotonic()

    def come() -> None:
        gate.open = True
        holding.look()

    asyncio.get_running_loop().call_at(at + 0.02, come)
    time.sleep(0.1)  # noqa: ASYNC251 - so that both are due in one turn, the engine first
    assert await task == "there"
