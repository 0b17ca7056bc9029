"""Requests that no engine can serve at this moment are held for one: in what order, how long, how many, and what ends
it. With real admission and legs that the test plays."""

import time
from dataclasses import replace

import pytest

from pdserve.proxy.legs import Released
from pdserve.proxy.parts import Point
from pdserve.proxy.testing import Rig, Running
from pdserve.proxy.testing.rig import FACTS, done, ready, tokens
from pdserve.proxy.types import Delta, Finish, Finished, Mode, OnFailure, Route, Sampling
from pdserve.rpc.errors import (
    DeadlinePassed,
    Draining,
    EngineDied,
    IncompatibleEngines,
    KvdUnavailable,
    NoEngines,
    PdserveError,
    ProducerFailed,
)

LONG = 600.0
"""Seconds that no test waits for: where it would, pytest's timeout ends it."""
SHORT = 0.02
BOTH = pytest.mark.parametrize("mode", list(Mode))
GREEDY = Sampling(max_tokens=4, min_tokens=3, temperature=0.0)


async def played_beside(rig: Rig, run: Running, number: int, decodes: int | None = None) -> None:
    """Plays the attempt with the prefill leg of this number, from 0, to its good end; `decodes`: of its decode leg,
    where that is another."""
    prefill = await rig.legs.nth_prefill(number)
    prefill.say(ready(), Released(FACTS))
    prefill.end()
    decode = await rig.legs.nth_decode(number if decodes is None else decodes)
    decode.say(tokens("a", Finish.LENGTH), done())
    decode.end()
    await run.task


async def played(rig: Rig, run: Running, number: int = 0) -> Finished:
    """Plays the last attempt to its good end, after which nothing is held."""
    await played_beside(rig, run, number)
    await rig.nothing_is_held()
    finished = run.events[-1]
    assert isinstance(finished, Finished)
    return finished


async def waiting(run: Running, rig: Rig, requests: int = 1) -> None:
    """So many are held, this one among them."""
    await rig.queued(requests)
    assert len(rig.admission.holding) == requests
    assert not run.task.done()


@BOTH
@pytest.mark.parametrize(("there", "missing"), [("prefill", "decode"), ("decode", "prefill"), ("", "both kinds")])
async def test_a_request_waits_for_the_engine_that_is_missing(mode: Mode, there: str, missing: str) -> None:
    """It holds nothing meanwhile, is answered by those that come, and its wait is the part `admit`."""
    rig = Rig(prefills=there == "prefill", decodes=there == "decode", hold_timeout=LONG)
    job = rig.job(mode)
    run = rig.start(job)
    await waiting(run, rig)
    assert rig.held() == 0
    assert Point.ADMITTED not in job.points
    came = time.monotonic_ns()
    for role in ("prefill", "decode"):
        if role != there:
            await waiting(run, rig)
            rig.join(f"{role[0]}9", role)
    finished = await played(rig, run)
    assert job.points[Point.ADMITTED] > came
    assert (finished.fallbacks, finished.recomputed_tokens) == (0, 0)


async def test_nobody_comes() -> None:
    """NO_ENGINES after the hold, with what was missing; nothing is held afterwards."""
    rig = Rig(decodes=0, hold_timeout=SHORT)
    with pytest.raises(NoEngines, match=r"1 prefill, 0 decode, 0 both; none came within 0\.02 s"):
        await rig.start(rig.job()).task
    await rig.queued(0)
    await rig.nothing_is_held()
    assert (rig.ended[0].reason, rig.ended[0].attempts) == ("NO_ENGINES", ())


async def test_the_requests_own_deadline_comes_first() -> None:
    """DEADLINE_EXCEEDED, when it passes and not when the hold would end."""
    rig = Rig(decodes=0, hold_timeout=LONG)
    with pytest.raises(DeadlinePassed, match="waited for an engine"):
        await rig.start(rig.job(deadline=time.monotonic() + SHORT)).task
    await rig.nothing_is_held()


async def test_a_hold_of_nothing_refuses_at_once() -> None:
    """With a timeout of 0, as without holding; no length is needed then."""
    rig = Rig(decodes=0, hold_timeout=0.0, hold_length=0)
    with pytest.raises(NoEngines) as refused:
        await rig.start(rig.job()).task
    assert "within" not in refused.value.message


async def test_so_many_are_held_and_no_more() -> None:
    """The next one hears at once what is missing, as if nobody were held; those who wait are served all the same, as
    they came."""
    rig = Rig(decodes=0, hold_timeout=LONG, hold_length=2)
    runs = []
    for count in (1, 2):
        runs.append(rig.start(rig.job()))
        await rig.queued(count)
    with pytest.raises(NoEngines, match="2 requests wait for one already") as refused:
        await rig.start(rig.job()).task
    assert refused.value.metadata["held"] == "2"
    rig.join("d9", "decode")
    for number, run in enumerate(runs):
        await played_beside(rig, run, number)
    await rig.nothing_is_held()


async def test_who_came_first_goes_first() -> None:
    """The engine that comes has room for one: it is the one that has waited longest, then the next."""
    rig = Rig(decodes=0, hold_timeout=LONG)
    jobs = [rig.job(request_id=name, prompt=tuple(range(100))) for name in ("first", "second", "third")]
    runs = []
    for count, job in enumerate(jobs, 1):
        runs.append(rig.start(job))
        await rig.queued(count)
    rig.join("d9", "decode")
    for number, run in enumerate(runs):
        await rig.legs.nth_prefill(number)
        await rig.queued(len(runs) - number - 1)
        assert [Point.ADMITTED in job.points for job in jobs] == [True] * (number + 1) + [False] * (2 - number)
        await played_beside(rig, run, number)


async def test_a_client_that_goes_away_leaves_nothing() -> None:
    """While it is held: its place is free for another, and the engine that comes is asked by nobody."""
    rig = Rig(decodes=0, hold_timeout=LONG, hold_length=1)
    run = rig.start(rig.job())
    await waiting(run, rig)
    await run.cancel()
    await rig.queued(0)
    assert rig.ended[0].reason == "CANCELLED"
    other = rig.start(rig.job())
    await waiting(other, rig)
    rig.join("d9", "decode")
    await played(rig, other)


async def test_an_engine_comes_in_the_moment_in_which_the_client_goes() -> None:
    """Let go and cancelled in the same turn of the loop: no credit stays with it."""
    rig = Rig(decodes=0, hold_timeout=LONG)
    run = rig.start(rig.job())
    await waiting(run, rig)
    rig.join("d9", "decode")
    await run.cancel()
    await rig.nothing_is_held()
    assert not rig.legs.prefills


async def test_who_waits_for_credits_is_held_when_its_engines_leave() -> None:
    """It is not refused, and it is served by the engine that comes."""
    rig = Rig(hold_timeout=LONG)
    hog = rig.start(rig.job(prompt=tuple(range(150))))
    await rig.legs.nth_prefill(0)
    run = rig.start(rig.job())
    await rig.queued(1)
    assert len(rig.admission.holding) == 0
    rig.leave("d0")
    await waiting(run, rig)
    await hog.cancel()
    rig.join("d9", "decode")
    await played_beside(rig, run, 1, decodes=0)
    await rig.nothing_is_held()


async def test_engines_that_do_not_fit_each_other_are_not_waited_for() -> None:
    """INCOMPATIBLE_ENGINES at once: what is there will not change by itself."""
    rig = Rig(hold_timeout=LONG)
    entry = rig.registry.get("d0")
    assert entry is not None
    entry.card = replace(entry.card, identity=(("dtype", "other"),))
    with pytest.raises(IncompatibleEngines):
        await rig.start(rig.job()).task


# -- after a failure ------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("error", [Draining("stops"), EngineDied("gone")])
async def test_an_engine_that_goes_is_waited_for(mode: Mode, error: PdserveError) -> None:
    """Decode refuses since it drains, or dies, and is the only one: the request goes on on the one that comes, also
    under policy `fail`. What it waited is in the part `retry`."""
    rig = Rig(hold_timeout=LONG)
    job = rig.job(mode, on_failure=OnFailure.FAIL)
    run = rig.start(job)
    prefill = await rig.legs.nth_prefill(0)
    if mode is Mode.READ:
        prefill.say(ready())
    (await rig.legs.nth_decode(0)).fail(error)
    await waiting(run, rig)
    rig.leave("d0")
    rig.join("d9", "decode")
    finished = await played(rig, run, 1)
    assert (finished.decode_engine_id, finished.fallbacks) == ("d9", 1)
    assert Point.REDISPATCHED in job.points


async def test_nobody_comes_after_a_failure() -> None:
    """The failure itself is said, not NO_ENGINES; the record says that it waited."""
    rig = Rig(hold_timeout=SHORT)
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("out of memory"))
    rig.leave("p0")
    with pytest.raises(EngineDied, match="out of memory"):
        await run.task
    await rig.nothing_is_held()
    assert rig.ended[0].waited


async def test_one_prompt_does_not_take_one_engine_after_the_other() -> None:
    """What dies of it is replaced once; when the successor dies of it too, the request ends with that, at once."""
    rig = Rig(hold_timeout=LONG)
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("the first"))
    rig.leave("p0")
    await waiting(run, rig)
    rig.join("p9", "prefill")
    (await rig.legs.nth_prefill(1)).fail(EngineDied("the second"))
    rig.leave("p9")
    with pytest.raises(EngineDied, match="the second"):
        await run.task
    await rig.nothing_is_held()


async def test_an_engine_that_failed_and_stays_is_not_waited_for() -> None:
    """Nobody is about to take its place: the failure is said at once."""
    rig = Rig(hold_timeout=LONG)
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).fail(KvdUnavailable("its kvd is away"))
    with pytest.raises(KvdUnavailable):
        await run.task
    assert not rig.ended[0].waited


async def test_decode_alone_comes_before_waiting() -> None:
    """Prefill dies and decode may compute the prompt: it does, now."""
    rig = Rig(hold_timeout=LONG)
    run = rig.start(rig.job(on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("gone"))
    rig.leave("p0")
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens("a", Finish.LENGTH), done())
    decode.end()
    await run.task
    await rig.nothing_is_held()


async def test_who_is_held_computes_nothing() -> None:
    """The permit to compute a prompt again is given back while a request waits for an engine: another one, which can be
    computed now, gets it."""
    rig = Rig(decodes=2, hold_timeout=LONG, recomputes=1)
    held = rig.start(rig.job(on_failure=OnFailure.RECOMPUTE))
    for number in range(2):  # both decode engines fail it, and one of them is there for others
        (await rig.legs.nth_prefill(number)).say(ready())
        leg = await rig.legs.nth_decode(number)
        if number:
            rig.leave(leg.engine.engine_id)
        leg.fail(EngineDied("gone"))
    await waiting(held, rig)
    other = rig.start(rig.job(on_failure=OnFailure.RECOMPUTE))
    (await rig.legs.nth_prefill(2)).fail(ProducerFailed("no room"))
    alone = await rig.legs.nth_decode(2)
    alone.say(tokens("a", Finish.LENGTH), done())
    alone.end()
    await other.task
    await waiting(held, rig)
    await held.cancel()
    await rig.nothing_is_held()


@BOTH
async def test_a_begun_answer_goes_on_on_the_engine_that_comes(mode: Mode) -> None:
    """The only decode engine dies in the middle of an answer: the client has one whole answer, and no error."""
    rig = Rig(hold_timeout=LONG)
    run = rig.start(rig.job(mode, sampling=GREEDY))
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready(), Released(FACTS))
    prefill.end()
    first = await rig.legs.nth_decode(0)
    first.say(tokens("a"), tokens("b"))
    while sum(isinstance(event, Delta) for event in run.events) < 2:
        await run.changed()
    first.fail(EngineDied("gone"))
    rig.leave("d0")
    await waiting(run, rig)
    rig.join("d9", "decode")
    again = await rig.legs.nth_prefill(1)
    again.say(ready(), Released(FACTS))
    again.end()
    second = await rig.legs.nth_decode(1)
    second.say(tokens("c"), tokens("d", Finish.LENGTH), done())
    second.end()
    await run.task
    assert "".join(event.text for event in run.events if isinstance(event, Delta)) == "abcd"
    finished = run.events[-1]
    assert isinstance(finished, Finished)
    assert (finished.continuations, finished.decode_engine_id) == (1, "d9")
    await rig.nothing_is_held()


# -- the proxy's own end --------------------------------------------------------------------


async def test_a_proxy_that_stops_tells_who_is_held() -> None:
    """DRAINING, at once, and to all that come."""
    rig = Rig(decodes=0, hold_timeout=LONG)
    run = rig.start(rig.job())
    await waiting(run, rig)
    rig.driver.stop("this proxy has stopped")
    for one in (run, rig.start(rig.job())):
        with pytest.raises(Draining, match="has stopped"):
            await one.task
    await rig.nothing_is_held()


async def test_an_engine_of_no_use_changes_nothing() -> None:
    """Another one of the kind that is there, or one that serves alone where the route wants a pair."""
    rig = Rig(decodes=0, hold_timeout=LONG)
    run = rig.start(rig.job(route=Route.SPLIT))
    await waiting(run, rig)
    rig.join("p8", "prefill")
    rig.join("b8", "both")
    await waiting(run, rig)
    rig.join("d9", "decode")
    finished = await played(rig, run)
    assert finished.decode_engine_id == "d9"
