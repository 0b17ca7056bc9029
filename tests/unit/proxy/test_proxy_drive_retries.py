"""A failed attempt, with legs that the test plays: who is asked next, and when nobody is."""

import asyncio

import pytest

from pdserve.proxy.legs import Done, Released
from pdserve.proxy.testing import Rig
from pdserve.proxy.testing.rig import done, ready, tokens
from pdserve.proxy.types import (
    Delta,
    Finish,
    Finished,
    Mode,
    OnFailure,
    Route,
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
    StaleEpoch,
    TieBroken,
    TransferExpired,
)


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
