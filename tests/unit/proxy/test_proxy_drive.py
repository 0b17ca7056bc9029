"""A request's life, with legs that the test plays: the order of its legs, and clients that leave. No network."""

import asyncio
import time

import pytest

from pdserve.proxy.legs import Done, Released
from pdserve.proxy.testing import Rig
from pdserve.proxy.testing.rig import FACTS, done, ready, tokens
from pdserve.proxy.types import (
    Delta,
    Finish,
    Finished,
    Mode,
    Route,
    Sampling,
    Started,
)
from pdserve.rpc.errors import (
    RequestCancelled,
)


async def test_read_is_serial() -> None:
    """Prefill first, then decode with the ticket; the answer does not wait for the release."""
    rig = Rig()
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    order = prefill.order
    assert (order.mode, order.consumers, order.peer_locator) == (Mode.READ, 1, b"locator of d0")
    assert len(order.transfer_id) == 16
    assert rig.legs.decodes == []
    prefill.say(ready(b"the ticket", cached=16))
    decode = await rig.legs.nth_decode(0)
    assert decode.order.source is not None
    assert decode.order.source.ticket == b"the ticket"
    assert decode.order.source.transfer_id == order.transfer_id
    assert decode.order.prompt == order.prompt, "tokenised once"
    decode.say(tokens("a"), tokens("b", Finish.LENGTH), done(recomputed=1))
    decode.end()
    await run.task
    started, first, last, finished = run.events
    assert started == Started("r", "1" * 32, "m", Mode.READ)
    assert isinstance(first, Delta)
    assert isinstance(last, Delta)
    assert isinstance(finished, Finished)
    assert finished.usage.cached_tokens == 16, "prefill's, not decode's"
    assert finished.transfer == FACTS
    assert (finished.mode, finished.fallbacks, finished.recomputed_tokens) == (Mode.READ, 0, 1)
    assert (finished.prefill_engine_id, finished.decode_engine_id) == ("p0", "d0")
    assert finished.timings.unattributed == 0
    assert not prefill.ended.is_set()
    assert rig.held() == 32, "prefill holds its blocks until they are released"
    prefill.say(Released(FACTS))
    prefill.end()
    await rig.nothing_is_held()
    assert prefill.cancelled is None
    assert decode.cancelled is None


async def test_write_opens_both_and_decode_first() -> None:
    """Each leg has the other's locator; decode's tokens may come before prefill's report."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE))
    prefill, decode = await rig.legs.nth_prefill(0), await rig.legs.nth_decode(0)
    assert rig.legs.order == ["decode", "prefill"]
    assert prefill.order.peer_locator == b"locator of d0"
    assert decode.order.source is not None
    assert decode.order.source.peer_locator == b"locator of p0"
    assert decode.order.source.transfer_id == prefill.order.transfer_id
    decode.say(tokens("a", Finish.LENGTH), done())
    decode.end()
    await run.until(Delta)
    assert not run.task.done(), "the facts of prefill are still to come"
    prefill.say(ready(cached=3), Released(FACTS))
    prefill.end()
    await run.task
    finished = await run.until(Finished)
    assert finished.usage.cached_tokens == 3
    await rig.nothing_is_held()


async def test_the_prefill_leg_ends_by_length() -> None:
    """One token, no stop, no minimum: the real parameters are decode's alone."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE))
    sampling = (await rig.legs.nth_prefill(0)).order.sampling
    assert sampling == Sampling(max_tokens=1, ignore_eos=True, temperature=0.5, seed=7)
    assert (await rig.legs.nth_decode(0)).order.sampling == rig.job().sampling
    await run.cancel()
    await rig.nothing_is_held()


async def test_colocated_has_one_leg() -> None:
    """No prefill leg, no transfer, the engine's own cached tokens."""
    rig = Rig(both=1)
    run = rig.start(rig.job(route=Route.COLOCATED))
    decode = await rig.legs.nth_decode(0)
    assert decode.engine.engine_id == "b0"
    assert decode.order.source is None
    decode.say(tokens(), Done(1, 16, 0))
    decode.end()
    await run.task
    finished = await run.until(Finished)
    assert finished.usage.cached_tokens == 16
    assert (finished.mode, finished.transfer, finished.prefill_engine_id) == (None, None, "")
    assert rig.legs.prefills == []
    await rig.nothing_is_held()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("moment", ["admission", "prefill", "decode", "streaming"])
async def test_a_client_that_goes_away_ends_both_legs(mode: Mode, moment: str) -> None:
    """At whatever moment: both legs are cancelled and every credit is back."""
    rig = Rig()
    grants = []
    if moment == "admission":
        first = rig.start(rig.job(mode, prompt=tuple(range(150))))
        await rig.legs.nth_prefill(0)
        grants.append(first)
    run = rig.start(rig.job(mode))
    if moment == "admission":
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(rig.admission) == 1
        await run.cancel()
        assert len(rig.legs.prefills) == 1, "nothing was dispatched"
        await first.cancel()
    else:
        prefill = await rig.legs.nth_prefill(0)
        if moment in ("decode", "streaming"):
            prefill.say(ready())
            decode = await rig.legs.nth_decode(0)
            if moment == "streaming":
                decode.say(tokens())
                await run.until(Delta)
        await run.cancel()
        assert all(isinstance(leg.cancelled, RequestCancelled) for leg in rig.legs.prefills)
        assert all(isinstance(leg.cancelled, RequestCancelled) for leg in rig.legs.decodes)
    await rig.nothing_is_held()


async def test_a_dropped_generator_is_ended_by_the_job() -> None:
    """The call's end is the sure sign: cancelling the job ends both legs though nobody reads."""
    rig = Rig()
    job = rig.job(Mode.WRITE)
    events = rig.driver.run(job)
    started = asyncio.ensure_future(anext(events))
    assert isinstance(await started, Started)
    reading = asyncio.ensure_future(anext(events))
    prefill = await rig.legs.nth_prefill(0)
    job.cancel()
    with pytest.raises(RequestCancelled):
        await reading
    assert isinstance(prefill.cancelled, RequestCancelled)
    await rig.nothing_is_held()


async def test_a_job_cancelled_before_its_legs_opens_none() -> None:
    """Cancelled between its grant and its legs."""
    rig = Rig()
    job = rig.job()
    events = rig.driver.run(job)
    await anext(events)
    job.cancel()
    with pytest.raises(RequestCancelled):
        await anext(events)
    assert rig.legs.order == []
    await rig.nothing_is_held()


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_defect_is_not_laid_on_the_client(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks within the proxy ends both legs, and stands in the attempt and the record as what it is."""

    def breaks(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("pdserve.proxy.history.History.hear", breaks)
    rig = Rig()
    run = rig.start(rig.job(mode))
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens())
    with pytest.raises(RuntimeError, match="a defect"):
        await run.task
    (ended,) = rig.ended
    (tried,) = ended.attempts
    assert (tried.reason, tried.error) == ("INTERNAL", "RuntimeError: a defect")
    assert (ended.reason, ended.error) == (tried.reason, tried.error)
    for leg in (prefill, decode):
        assert leg.cancelled is not None
        assert leg.cancelled.reason == "INTERNAL"
    await rig.nothing_is_held()


async def test_the_deadline_goes_with_the_legs() -> None:
    """Each leg gets what is left of the request's time, and the attempt's span for a parent."""
    rig = Rig()
    job = rig.job(deadline=time.monotonic() + 30)
    run = rig.start(job)
    prefill = await rig.legs.nth_prefill(0)
    assert 20 < prefill.timeout <= 30
    assert prefill.traceparent == f"00-{'1' * 32}-{job.trace.attempt_id(1)}-01"
    await run.cancel()
    await rig.nothing_is_held()
