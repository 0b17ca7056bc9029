"""The record of a request's end: one a request, whatever became of it, and the line that is logged of it."""

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from pdserve.proxy.ended import Ended, Outcome, Tried, to_log
from pdserve.proxy.legs import Released
from pdserve.proxy.testing import Rig, Running
from pdserve.proxy.testing.rig import done, ready, tokens
from pdserve.proxy.types import Delta, Finish, Finished, Mode, OnFailure, Route, Sampling
from pdserve.rpc.errors import EngineDied, InvalidRequest, NoEngines, ProducerFailed

GREEDY = Sampling(max_tokens=4, temperature=0.0)


async def answered(rig: Rig, run: Running, prefill: int, decode: int) -> None:
    """Plays the legs of these numbers to a good end."""
    offering = await rig.legs.nth_prefill(prefill)
    offering.say(ready(), Released(None))
    offering.end()
    answering = await rig.legs.nth_decode(decode)
    answering.say(tokens("z", Finish.LENGTH), done())
    answering.end()
    await run.task


def only(rig: Rig) -> Ended:
    """The one record that there is."""
    assert len(rig.ended) == 1
    return rig.ended[0]


async def test_a_finished_request_has_its_facts() -> None:
    """One attempt that ended well, and what the client was told."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE))
    await answered(rig, run, 0, 0)
    record = only(rig)
    assert (record.request_id, record.trace_id, record.model) == ("r", "1" * 32, "m")
    assert (record.outcome, record.reason, record.error) == (Outcome.FINISHED, "", "")
    assert (record.prompt_tokens, record.completion_tokens) == (20, 1)
    assert record.finished is run.events[-1]
    transfer_id = rig.legs.prefills[0].order.transfer_id.hex()
    assert record.attempts == (Tried("p0", "d0", transfer_id, Mode.WRITE, tokens=1),)


async def test_every_attempt_is_in_it() -> None:
    """Which engines and transfer, what it gave, how it ended and who was blamed; before the first token and after."""
    rig = Rig(prefills=3, decodes=2)
    run = rig.start(rig.job(sampling=GREEDY))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("out of memory"))
    (await rig.legs.nth_prefill(1)).say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens("a"), tokens("b"))
    await run.until(Delta)
    decode.fail(EngineDied("unplugged"))
    await answered(rig, run, 2, 1)
    record = only(rig)
    assert (record.outcome, record.fallbacks, record.continuations) == (Outcome.FINISHED, 1, 1)
    assert record.completion_tokens == 3
    prefills, decodes = rig.legs.prefills, rig.legs.decodes
    ids = [leg.order.transfer_id.hex() for leg in prefills]
    p = [leg.engine.engine_id for leg in prefills]
    d = [leg.engine.engine_id for leg in decodes]
    assert record.attempts == (
        Tried(p[0], record.attempts[0].decode_engine_id, ids[0], Mode.READ, 0, "ENGINE_DIED", "out of memory", p[0]),
        Tried(p[1], d[0], ids[1], Mode.READ, 2, "ENGINE_DIED", "unplugged", d[0]),
        Tried(p[2], d[1], ids[2], Mode.READ, 1),
    )


async def test_a_failed_request_says_what_the_client_got() -> None:
    """The reason of its error, which need not be the last attempt's."""
    rig = Rig()
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).fail(ProducerFailed("no room"))
    with pytest.raises(ProducerFailed):
        await run.task
    record = only(rig)
    assert (record.outcome, record.reason, record.error) == (Outcome.FAILED, "PRODUCER_FAILED", "no room")
    assert record.finished is None
    assert [tried.blamed for tried in record.attempts] == ["p0"]
    with pytest.raises(NoEngines):
        await rig.start(rig.job(route=Route.COLOCATED)).task
    assert (rig.ended[1].reason, rig.ended[1].attempts) == ("NO_ENGINES", ())


@pytest.mark.parametrize("moment", ["admission", "prefill", "decode", "streaming"])
async def test_a_cancelled_request_is_cancelled(moment: str) -> None:
    """At whatever moment, with nobody to blame."""
    rig = Rig()
    if moment == "admission":
        first = rig.start(rig.job(prompt=tuple(range(150))))
        await rig.legs.nth_prefill(0)
    run = rig.start(rig.job())
    if moment == "admission":
        await rig.queued(1)
    else:
        prefill = await rig.legs.nth_prefill(0)
        if moment in ("decode", "streaming"):
            prefill.say(ready())
            decode = await rig.legs.nth_decode(0)
            if moment == "streaming":
                decode.say(tokens())
                await run.until(Delta)
    await run.cancel()
    record = only(rig)
    assert (record.outcome, record.reason) == (Outcome.CANCELLED, "CANCELLED")
    assert [(tried.reason, tried.blamed) for tried in record.attempts] == (
        [] if moment == "admission" else [("CANCELLED", "")]
    )
    if moment == "admission":
        await first.cancel()
        assert len(rig.ended) == 2


async def test_a_call_that_ended_at_its_deadline_was_not_cancelled() -> None:
    """gRPC ends a handler in the same way for both; the record tells them apart."""
    rig = Rig()
    run = rig.start(rig.job(deadline=time.monotonic()))
    await rig.legs.nth_prefill(0)
    await run.cancel()
    assert (only(rig).outcome, only(rig).reason) == (Outcome.FAILED, "DEADLINE_EXCEEDED")


async def test_a_face_that_does_not_come_back_for_more_has_its_answer() -> None:
    """Closing the events behind the last one is no cancellation."""
    rig = Rig()
    events = rig.driver.run(rig.job())
    taking = asyncio.ensure_future(anext(events))
    await taking
    reading = asyncio.ensure_future(anext(events))
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready(), Released(None))
    prefill.end()
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens("a", Finish.STOP), done())
    decode.end()
    await reading
    assert isinstance(await anext(events), Finished)
    assert rig.ended == []
    await events.aclose()
    assert only(rig).outcome is Outcome.FINISHED


async def test_the_line_that_is_logged() -> None:
    """Exactly one a request, a warning where it failed; attempts as plain values."""
    rig = Rig()
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(0)).fail(InvalidRequest("refused"))
    with pytest.raises(InvalidRequest):
        await run.task
    with capture_logs() as lines:
        to_log(only(rig))
    (line,) = lines
    assert (line["event"], line["log_level"], line["outcome"]) == ("request_ended", "warning", "failed")
    assert (line["request_id"], line["trace_id"], line["reason"]) == ("r", "1" * 32, "INVALID_REQUEST")
    (attempt,) = line["attempts"]
    assert (attempt["mode"], attempt["reason"], attempt["decode_engine_id"]) == ("read", "INVALID_REQUEST", "d0")
