"""WRITE whose prefill reports after the answer is complete: the client, the record and the spans tell one story."""

import asyncio

import pytest

from pdserve.proxy import attempt
from pdserve.proxy.testing import Rig
from pdserve.proxy.testing.rig import done, ready, tokens
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.types import Finish, Finished, Mode
from pdserve.rpc.errors import PdserveError
from pdserve.runtime.telemetry import names


async def test_what_comes_after_the_end_is_in_nobodys_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that the client got are those of the root span, though prefill's stamps came between the two."""
    monkeypatch.setattr(attempt, "LATE_READY", 0.0)
    rig = Rig()
    events = rig.driver.run(rig.job(mode=Mode.WRITE))
    await anext(events)
    asked = anext(events)

    async def play() -> None:

        decode = await rig.legs.nth_decode(0)
        decode.say(tokens("a", Finish.LENGTH), done())
        decode.end()

    await asyncio.gather(asked, play())
    finished = await anext(events)
    assert isinstance(finished, Finished)
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    for _ in range(5):
        await asyncio.sleep(0)  # prefill's leg is heard
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    root = spans_of(rig.ended[0], 0)[0].attributes
    told = {names.ttft_part(part): seconds for part, seconds in finished.timings.parts.items()}
    parts = {names.ttft_part(part) for part in (*names.PARTS, names.RETRY)}
    assert {name: value for name, value in root.items() if name in parts} == told
    assert not any("prefill" in name for name in told)
    assert not {names.ttft_part(part) for part in ("proxy.serialization", "decode.admit", "kv.wait")} & told.keys()
    prefill.fail(PdserveError("over"))
    await rig.owner.idle()
