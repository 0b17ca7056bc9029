"""Answers that have begun and go on elsewhere, with legs that the test plays."""

from typing import Any

import pytest

from pdserve.proxy.legs import Done, Released
from pdserve.proxy.parts import Point
from pdserve.proxy.testing import Rig, Running
from pdserve.proxy.testing.rig import FACTS, ready, tokens
from pdserve.proxy.types import Delta, Finish, Finished, Mode, OnFailure, Route, Sampling, Started, Usage
from pdserve.rpc.errors import (
    ConsumerFailed,
    Draining,
    EngineDied,
    InvalidRequest,
    PdserveError,
    PeerLost,
    ProducerFailed,
    RequestCancelled,
)

GREEDY = Sampling(max_tokens=4, min_tokens=3, temperature=0.0, logprobs=1)
PROMPT = tuple(range(20))
BOTH = pytest.mark.parametrize("mode", list(Mode))


def text(run: Running) -> str:
    """What the client has."""
    return "".join(event.text for event in run.events if isinstance(event, Delta))


async def begun(rig: Rig, number: int = 0, *texts: str, cached: int = 0) -> Any:
    """Plays attempt `number` up to its first tokens; its decode leg."""
    prefill = await rig.legs.nth_prefill(number)
    prefill.say(ready(cached=cached), Released(FACTS))
    prefill.end()
    decode = await rig.legs.nth_decode(number)
    decode.say(*map(tokens, texts))
    return decode


async def heard(run: Running, wanted: str) -> None:
    """Waits until the client has this text."""
    while text(run) != wanted:
        await run.changed()


async def ended(rig: Rig, decode: Any, *texts: str) -> None:
    """Plays the rest of an answer, whose last text ends it."""
    decode.say(*map(tokens, texts[:-1]), tokens(texts[-1], Finish.LENGTH), Done(len(texts), 5, 0, FACTS))
    decode.end()


@BOTH
@pytest.mark.parametrize("policy", list(OnFailure))
@pytest.mark.parametrize(
    "error", [EngineDied("gone"), Draining("stops"), ConsumerFailed("stopped short"), PeerLost("its kvd is gone")]
)
async def test_a_begun_answer_goes_on_on_another_pair(mode: Mode, policy: OnFailure, error: PdserveError) -> None:
    """Whatever the policy, for the hand-over had succeeded: a fresh transfer of the prompt and what was told, for the
    tokens that are missing; one answer and one end to the client."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(mode, sampling=GREEDY, on_failure=policy))
    first = await begun(rig, 0, "a", "b", cached=16)
    await heard(run, "ab")
    first.fail(error)
    second = await begun(rig, 1, cached=20)
    prefill = rig.legs.prefills[1]
    assert second.engine.engine_id != first.engine.engine_id
    assert prefill.order.prompt == second.order.prompt == (*PROMPT, 97, 97)
    assert second.order.sampling == Sampling(max_tokens=2, min_tokens=1, temperature=0.0, logprobs=1)
    assert prefill.order.transfer_id != rig.legs.prefills[0].order.transfer_id
    await ended(rig, second, "c", "d")
    await run.task
    assert text(run) == "abcd"
    assert sum(isinstance(event, Started) for event in run.events) == 1
    finished = run.events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage == Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=4)
    assert (finished.continuations, finished.fallbacks, finished.mode, finished.transfer) == (1, 0, mode, FACTS)
    assert finished.decode_engine_id == second.engine.engine_id
    assert rig.ended[0].attempts[0].blamed == first.engine.engine_id
    await rig.nothing_is_held()


async def test_the_way_to_the_first_token_is_the_first_attempts() -> None:
    """The timings explain the TTFT that the client saw; what came later does not move it."""
    rig = Rig(prefills=2, decodes=2)
    job = rig.job(sampling=GREEDY)
    run = rig.start(job)
    first = await begun(rig, 0, "a")
    await heard(run, "a")
    first.fail(EngineDied("gone"))
    second = await begun(rig, 1)
    points = dict(job.points)
    await ended(rig, second, "b", "c", "d")
    await run.task
    finished = await run.until(Finished)
    assert {point: job.points[point] for point in points} == points
    assert points[Point.FIRST_BYTE_WRITTEN] - points[Point.RECEIVED] == pytest.approx(finished.timings.ttft * 1e9)
    assert "retry" not in finished.timings.parts
    await rig.nothing_is_held()


async def test_an_answer_goes_on_as_often_as_allowed() -> None:
    """The bound counts attempts after the first token; beyond it the last failure is the answer."""
    rig = Rig(prefills=1, decodes=4, continuations=2)
    run = rig.start(rig.job(sampling=GREEDY))
    for number in range(3):
        decode = await begun(rig, number, "abc"[number])
        await heard(run, "abc"[: number + 1])
        decode.fail(EngineDied(f"gone {number}"))
    with pytest.raises(EngineDied, match="gone 2"):
        await run.task
    assert [leg.order.sampling.max_tokens for leg in rig.legs.decodes] == [4, 3, 2]
    assert len({leg.engine.engine_id for leg in rig.legs.decodes}) == 3
    await rig.nothing_is_held()


async def test_an_attempt_that_gives_nothing_counts_too() -> None:
    """It was work all the same; and with 0 nothing is tried at all."""
    rig = Rig(prefills=3, decodes=3, continuations=1)
    run = rig.start(rig.job(sampling=GREEDY))
    (await begun(rig, 0, "a")).fail(EngineDied("first"))
    await heard(run, "a")
    (await rig.legs.nth_prefill(1)).fail(EngineDied("second"))
    with pytest.raises(EngineDied, match="second"):
        await run.task
    never = Rig(prefills=2, decodes=2, continuations=0)
    run = never.start(never.job(sampling=GREEDY))
    (await begun(never, 0, "a")).fail(EngineDied("only"))
    with pytest.raises(EngineDied, match="only"):
        await run.task
    assert len(never.legs.decodes) == 1


@pytest.mark.parametrize("policy", list(OnFailure))
async def test_a_continuation_whose_hand_over_fails_is_under_the_policy(policy: OnFailure) -> None:
    """`fail` ends the request with that failure; `recompute` tries on, within the same bound."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(sampling=GREEDY, on_failure=policy))
    (await begun(rig, 0, "a")).fail(EngineDied("gone"))
    (await begun(rig, 1)).fail(ProducerFailed("offered, then lost"))
    if policy is OnFailure.FAIL:
        with pytest.raises(ProducerFailed):
            await run.task
    else:
        await ended(rig, await begun(rig, 2), "b", "c", "d")
        await run.task
        assert text(run) == "abcd"
    await rig.nothing_is_held()


async def test_with_no_other_pair_decode_computes_where_the_policy_allows_it() -> None:
    """Policy recompute and no prefill engine left: a decode engine computes prompt and answer so far."""
    rig = Rig(prefills=1, decodes=2)
    run = rig.start(rig.job(sampling=GREEDY, on_failure=OnFailure.RECOMPUTE))
    (await begun(rig, 0, "a")).fail(EngineDied("gone"))
    await heard(run, "a")
    (await rig.legs.nth_prefill(1)).fail(EngineDied("gone too"))
    alone = await rig.legs.nth_decode(1)
    assert (alone.order.source, alone.order.prompt) == (None, (*PROMPT, 97))
    await ended(rig, alone, "b", "c", "d")
    await run.task
    finished = await run.until(Finished)
    assert (finished.continuations, finished.fallbacks, finished.recomputed_tokens) == (2, 0, 16)
    assert (finished.mode, finished.transfer, finished.prefill_engine_id) == (None, None, "")
    await rig.nothing_is_held()


@pytest.mark.parametrize("policy", list(OnFailure))
async def test_with_nobody_left_the_failure_is_said(policy: OnFailure) -> None:
    """The only decode engine is gone: its error, not that there are no engines."""
    rig = Rig()
    run = rig.start(rig.job(sampling=GREEDY, on_failure=policy))
    (await begun(rig, 0, "a")).fail(EngineDied("out of memory"))
    with pytest.raises(EngineDied, match="out of memory"):
        await run.task
    await rig.nothing_is_held()


async def test_a_colocated_answer_goes_on_too() -> None:
    """On another colocated engine, with no hand-over."""
    rig = Rig(prefills=0, decodes=0, both=2)
    run = rig.start(rig.job(sampling=GREEDY, route=Route.COLOCATED, on_failure=OnFailure.FAIL))
    first = await rig.legs.nth_decode(0)
    first.say(tokens("a"))
    await heard(run, "a")
    first.fail(EngineDied("gone"))
    second = await rig.legs.nth_decode(1)
    assert second.engine.engine_id != first.engine.engine_id
    await ended(rig, second, "b", "c", "d")
    await run.task
    finished = await run.until(Finished)
    assert (finished.usage, finished.continuations) == (Usage(20, 0, 4), 1)
    assert finished.recomputed_tokens == 0
    await rig.nothing_is_held()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=4, temperature=0.5, seed=7),
        Sampling(max_tokens=4, temperature=0.0, presence_penalty=0.5),
        Sampling(max_tokens=4, temperature=0.0, frequency_penalty=0.5),
        Sampling(max_tokens=4, temperature=0.5, stop=("long",)),
        Sampling(max_tokens=4, temperature=0.0, n=2),
    ],
)
async def test_what_cannot_be_joined_ends_with_the_failure(sampling: Sampling) -> None:
    """Rather the typed error than an answer that is not one."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(sampling=sampling, on_failure=OnFailure.RECOMPUTE))
    (await begun(rig, 0, "a")).fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await run.task
    assert len(rig.legs.decodes) == 1
    await rig.nothing_is_held()


async def test_another_answer_is_not_passed_on() -> None:
    """A second engine that says something else than what was told: the first failure ends the request, nothing of
    the other answer reached the client."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(sampling=Sampling(max_tokens=4, temperature=0.0, stop=("xyz",))))
    (await begun(rig, 0, "", "", "a")).fail(EngineDied("gone"))
    await heard(run, "a")
    await begun(rig, 1, "", "", "q")
    with pytest.raises(EngineDied, match="gone"):
        await run.task
    assert text(run) == "a"
    assert rig.ended[0].attempts[1].reason == "DIVERGED"
    assert isinstance(rig.legs.decodes[1].cancelled, RequestCancelled)
    await rig.nothing_is_held()


@BOTH
async def test_a_complete_answer_whose_last_word_is_lost_is_an_answer(mode: Mode) -> None:
    """Decode dies between its last token and its sum: nothing is missing, nothing is tried again."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(mode, sampling=GREEDY))
    decode = await begun(rig, 0, "a", "b", cached=16)
    decode.say(tokens("c", Finish.STOP))
    await heard(run, "abc")
    decode.fail(EngineDied("gone"))
    await run.task
    finished = await run.until(Finished)
    assert finished.usage == Usage(20, 16, 3)
    assert (finished.transfer, finished.mode, finished.continuations) == (None, mode, 0)
    assert len(rig.legs.decodes) == 1
    assert (rig.ended[0].outcome.value, rig.ended[0].attempts[0].reason) == ("finished", "ENGINE_DIED")
    await rig.nothing_is_held()


async def test_the_requests_own_fault_is_not_tried_again() -> None:
    """An error that would come again ends a begun answer too."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(sampling=GREEDY))
    (await begun(rig, 0, "a")).fail(InvalidRequest("refused"))
    with pytest.raises(InvalidRequest):
        await run.task
    assert len(rig.legs.decodes) == 1


async def test_a_client_that_goes_away_during_a_continuation_ends_it() -> None:
    """Both legs of the second attempt, too."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(sampling=GREEDY))
    (await begun(rig, 0, "a")).fail(EngineDied("gone"))
    await heard(run, "a")
    prefill = await rig.legs.nth_prefill(1)
    await run.cancel()
    assert isinstance(prefill.cancelled, RequestCancelled)
    await rig.nothing_is_held()


async def test_the_permit_to_recompute_comes_back_between_continuations() -> None:
    """One permit, and three attempts that need it one after the other; the second gives no token."""
    rig = Rig(prefills=1, decodes=3, recomputes=1)
    run = rig.start(rig.job(sampling=GREEDY, on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("gone"))
    first = await rig.legs.nth_decode(0)
    first.say(tokens("a"))
    await heard(run, "a")
    first.fail(EngineDied("gone"))
    (await rig.legs.nth_decode(1)).fail(EngineDied("gone"))
    await ended(rig, await rig.legs.nth_decode(2), "b", "c", "d")
    await run.task
    finished = await run.until(Finished)
    assert (finished.fallbacks, finished.continuations) == (1, 2)
    await rig.nothing_is_held()
