"""A request's life, with legs that the test plays: every order of events, no clock, no network."""

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
    OnFailure,
    Route,
    Sampling,
    Started,
)
from pdserve.rpc.errors import (
    ConsumerFailed,
    DeadlinePassed,
    Draining,
    EngineDied,
    IncompatibleEngines,
    InvalidRequest,
    KvdUnavailable,
    NoEngines,
    PdserveError,
    PeerLost,
    ProducerFailed,
    RequestCancelled,
    StaleEpoch,
    TieBroken,
    TransferExpired,
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


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_prefill_that_fails_before_its_offer_ends_decode_at_once(mode: Mode) -> None:
    """The client gets prefill's own reason, with no deadline to wait for."""
    rig = Rig()
    run = rig.start(rig.job(mode))
    prefill = await rig.legs.nth_prefill(0)
    prefill.fail(InvalidRequest("the engine refuses this seed"))
    with pytest.raises(InvalidRequest, match="refuses this seed"):
        await run.task
    if mode is Mode.WRITE:
        assert isinstance(rig.legs.decodes[0].cancelled, InvalidRequest)
    else:
        assert rig.legs.decodes == []
    await rig.nothing_is_held()


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_decode_that_fails_ends_prefill_at_once(mode: Mode) -> None:
    """No block waits for a lease to run out."""
    rig = Rig()
    run = rig.start(rig.job(mode))
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.fail(InvalidRequest("no such stop token"))
    with pytest.raises(InvalidRequest, match="no such stop token"):
        await run.task
    assert isinstance(prefill.cancelled, InvalidRequest)
    await rig.nothing_is_held()


async def test_a_producer_lost_after_its_offer_gets_a_grace() -> None:
    """Decode may have landed already; where it says nothing, it is cut off with prefill's reason."""
    rig = Rig()
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    prefill.fail(PeerLost("prefill's daemon is gone"))
    with pytest.raises(PeerLost):
        await run.task
    assert isinstance(decode.cancelled, PeerLost)
    await rig.nothing_is_held()


async def test_decodes_word_on_prefill_waits_for_prefills_own() -> None:
    """WRITE: kvd tells decode of a dead producer before the proxy hears of it. The engine's death is the cause, which a
    request that may not fail a hand-over survives on another pair."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE, on_failure=OnFailure.FAIL))
    decode, prefill = await rig.legs.nth_decode(0), await rig.legs.nth_prefill(0)
    decode.fail(PeerLost("rank 0 is gone"))
    await decode.ended.wait()
    prefill.fail(EngineDied("killed"))
    with pytest.raises(EngineDied):
        await run.task
    await rig.nothing_is_held()


async def test_a_producer_lost_with_its_offer_never_reaches_decode() -> None:
    """Offered and lost in the same turn of the loop: decode is not opened for what is not there."""
    rig = Rig()
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    prefill.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await run.task
    assert rig.legs.decodes == []
    await rig.nothing_is_held()


async def test_a_producer_lost_after_the_landing_changes_nothing() -> None:
    """Tokens flow: the answer is completed."""
    rig = Rig(grace=0.0)
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens())
    await run.until(Delta)
    prefill.fail(EngineDied("gone"))
    await prefill.ended.wait()
    await rig.owner.idle()
    decode.say(tokens("b", Finish.STOP), done())
    decode.end()
    await run.task
    assert decode.cancelled is None
    await rig.nothing_is_held()


async def test_an_overdue_release_is_cut_off() -> None:
    """The producer's blocks come back though kvd never said so; the answer is not touched."""
    rig = Rig(release_timeout=0.01)
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens("a", Finish.STOP), done())
    decode.end()
    await run.task
    await prefill.ended.wait()
    assert isinstance(prefill.cancelled, TransferExpired)
    await rig.nothing_is_held()


async def test_legs_that_end_without_their_last_word_are_failures() -> None:
    """A service that closes its stream early is not taken for success."""
    rig = Rig()
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(0)).end()
    with pytest.raises(ProducerFailed, match="without an offer"):
        await run.task
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(1)).say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens())
    decode.end()
    with pytest.raises(ConsumerFailed, match="without finishing"):
        await run.task
    await rig.nothing_is_held()


@pytest.mark.parametrize("policy", list(OnFailure))
@pytest.mark.parametrize("error", [EngineDied("gone"), Draining("drains"), StaleEpoch("restarted")])
async def test_an_unreachable_prefill_is_replaced(error: PdserveError, policy: OnFailure) -> None:
    """Another engine, another transfer id, whatever the policy: nothing was handed over yet."""
    rig = Rig(prefills=2)
    run = rig.start(rig.job(on_failure=policy))
    first = await rig.legs.nth_prefill(0)
    first.fail(error)
    second = await rig.legs.nth_prefill(1)
    assert second.engine.engine_id != first.engine.engine_id
    assert second.order.transfer_id != first.order.transfer_id
    second.say(ready(), Released(None))
    second.end()
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens("a", Finish.LENGTH), done())
    decode.end()
    await run.task
    finished = await run.until(Finished)
    assert finished.fallbacks == 1
    assert "retry" in finished.timings.parts
    assert sum(isinstance(event, Started) for event in run.events) == 1
    await rig.nothing_is_held()


@pytest.mark.parametrize(
    ("error", "moves"),
    [
        (ProducerFailed("x"), "p"),
        (PeerLost("x"), "p"),
        (TransferExpired("x"), "p"),
        (ConsumerFailed("x"), "d"),
        (KvdUnavailable("x"), "d"),
    ],
)
async def test_the_engine_at_fault_is_avoided(error: PdserveError, moves: str) -> None:
    """What decode reports is laid on the side that it names."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(on_failure=OnFailure.RECOMPUTE))
    first = await rig.legs.nth_prefill(0)
    first.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.fail(error)
    second = await rig.legs.nth_prefill(1)
    second.say(ready())
    again = await rig.legs.nth_decode(1)
    if moves == "p":
        assert second.engine.engine_id != first.engine.engine_id
    else:
        assert again.engine.engine_id != decode.engine.engine_id
    await run.cancel()
    await rig.nothing_is_held()


async def test_a_broken_tie_is_tried_again_on_the_same_pair() -> None:
    """Nobody is at fault."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE, on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_decode(0)).fail(TieBroken("the youngest"))
    decode = await rig.legs.nth_decode(1)
    assert decode.order.source is not None
    await run.cancel()
    await rig.nothing_is_held()


async def test_with_no_other_prefill_the_prompt_is_computed_at_decode() -> None:
    """Policy recompute: a decode leg without a source, and the answer says how many tokens that cost."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE, on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("gone"))
    again = await rig.legs.nth_decode(1)
    assert again.order.source is None
    assert isinstance(rig.legs.decodes[0].cancelled, EngineDied)
    again.say(tokens("a", Finish.LENGTH), Done(1, 16, 0))
    again.end()
    await run.task
    finished = await run.until(Finished)
    assert (finished.recomputed_tokens, finished.fallbacks, finished.mode) == (4, 1, None)
    assert len(rig.legs.prefills) == 1
    await rig.nothing_is_held()


@pytest.mark.parametrize("mode", list(Mode))
async def test_an_engine_without_its_kvd_still_computes(mode: Mode) -> None:
    """The only pair's daemon is away: no hand-over, but policy recompute still has its decode engine."""
    rig = Rig()
    run = rig.start(rig.job(mode, on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_prefill(0)).say(ready())
    (await rig.legs.nth_decode(0)).fail(KvdUnavailable("restarted"))
    alone = await rig.legs.nth_decode(1)
    assert (alone.engine.engine_id, alone.order.source) == ("d0", None)
    alone.say(tokens("a", Finish.LENGTH), Done(1, 0, 0))
    alone.end()
    await run.task
    assert (await run.until(Finished)).fallbacks == 1
    await rig.nothing_is_held()


async def test_recomputing_is_capped() -> None:
    """With one permit the second prompt waits for the first one's token, not for its whole answer."""
    rig = Rig(recomputes=1)
    runs = [rig.start(rig.job(on_failure=OnFailure.RECOMPUTE)) for _ in range(2)]
    for number in range(2):
        (await rig.legs.nth_prefill(number)).fail(EngineDied("gone"))
    first = await rig.legs.nth_decode(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(rig.legs.decodes) == 1
    first.say(tokens())
    await rig.legs.nth_decode(1)
    for run in runs:
        await run.cancel()
    await rig.nothing_is_held()


@pytest.mark.parametrize("error", [ProducerFailed("x"), TieBroken("x"), TransferExpired("x")])
async def test_policy_fail_ends_at_the_first_failed_hand_over(error: PdserveError) -> None:
    """Though others could take it: the client asked to be told."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(0)).say(ready())
    (await rig.legs.nth_decode(0)).fail(error)
    with pytest.raises(type(error)):
        await run.task
    assert len(rig.legs.prefills) == 1
    await rig.nothing_is_held()


@pytest.mark.parametrize("error", [InvalidRequest("x"), IncompatibleEngines("x"), DeadlinePassed("x")])
async def test_what_fails_everywhere_is_not_retried(error: PdserveError) -> None:
    """A request's own fault, and a deadline that is over."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_prefill(0)).fail(error)
    with pytest.raises(type(error)):
        await run.task
    await rig.nothing_is_held()


async def test_a_sampled_answer_with_a_seed_is_not_tried_again_after_its_first_token() -> None:
    """The client has text: another engine's answer could not be joined to it."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(on_failure=OnFailure.RECOMPUTE))
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens())
    await run.until(Delta)
    decode.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await run.task
    assert len(rig.legs.prefills) == 1
    await rig.nothing_is_held()


async def test_retries_are_counted() -> None:
    """The configured number and no more; the last failure is the answer."""
    rig = Rig(prefills=4, retries=2)
    run = rig.start(rig.job())
    for number in range(3):
        (await rig.legs.nth_prefill(number)).fail(EngineDied(f"gone {number}"))
    with pytest.raises(EngineDied, match="gone 2"):
        await run.task
    assert len({leg.engine.engine_id for leg in rig.legs.prefills}) == 3
    await rig.nothing_is_held()


async def test_where_nobody_is_left_the_failure_itself_is_said() -> None:
    """Not NO_ENGINES: that would hide what happened."""
    rig = Rig()
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(0)).fail(EngineDied("out of memory"))
    with pytest.raises(EngineDied, match="out of memory"):
        await run.task
    with pytest.raises(NoEngines):
        await rig.start(rig.job(route=Route.COLOCATED)).task
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
