"""Legs that fail: the other leg ends at once, and the request is tried elsewhere, computed at decode, or ended with
the reason, as its policy says."""

import asyncio

import pytest

from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import Fault
from pdserve.rpc import errors
from tests.sim.fleet import Launch, Prompt

TOKENS = 100
FAST = 1e12
BOTH = pytest.mark.parametrize("mode", ["read", "write"])


@BOTH
async def test_fail_says_why(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Policy fail: a copy that fails ends the request with kvd's reason, over both faces, and both legs with it."""
    fleet = await launch(bandwidth=FAST)
    fleet.faults.script += [Fault.FAIL]
    with pytest.raises(errors.TransferFailed, match="the simulated link failed"):
        await fleet.ask(prompt(TOKENS), mode=mode)
    await fleet.settled(5)
    fleet.faults.script[:] = [Fault.FAIL]
    body = {"prompt": list(prompt(TOKENS)), "max_tokens": 4, "pdserve": {"mode": mode}}
    status, answer = await fleet.post(body)
    assert (status, answer["error"]["code"]) == (503, "TRANSFER_FAILED")


@BOTH
async def test_recompute_tries_elsewhere_first(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Policy recompute: a fresh transfer, and only if that fails as well the prompt is computed at decode."""
    fleet = await launch(bandwidth=FAST, prefills=2, token_budget=4096)
    tokens = prompt(TOKENS)
    fleet.faults.script += [Fault.FAIL]
    again = await fleet.ask(tokens, mode=mode, on_failure="recompute")
    assert again.token_ids == await fleet.alone(tokens)
    assert (again.fallbacks, again.recomputed_tokens, again.mode) == (1, 0, mode)


@BOTH
async def test_recompute_computes_at_decode_in_the_end(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Every transfer fails: the same tokens all the same, and the answer says what it cost."""
    fleet = await launch(bandwidth=FAST, prefix_cache=False)
    tokens = prompt(TOKENS)
    fleet.faults.script += [Fault.FAIL] * 100
    answer = await fleet.ask(tokens, mode=mode, on_failure="recompute")
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.fallbacks, answer.recomputed_tokens) == (3, TOKENS)
    assert (answer.mode, answer.transfer, answer.prefill_engine_id) == (None, None, "")


@BOTH
async def test_one_of_several_hand_overs_fails(launch: Launch, prompt: Prompt, mode: str) -> None:
    """n = 2, policy recompute: the answer whose copy fails is computed at decode, and the cost is said."""
    fleet = await launch(bandwidth=FAST, prefix_cache=False)
    tokens = prompt(TOKENS)
    fleet.faults.script += [None, Fault.FAIL]
    answer = await fleet.ask(tokens, mode=mode, on_failure="recompute", n=2)
    alone = await fleet.alone(tokens)
    assert [choice.token_ids for choice in answer.choices] == [alone, alone]
    assert (answer.fallbacks, answer.recomputed_tokens) == (1, TOKENS)
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("pairs", [1, 2])
async def test_prefill_dies_while_it_computes(launch: Launch, prompt: Prompt, mode: str, pairs: int) -> None:
    """Another prefill engine takes over; where there is none, the error says that the engine died."""
    fleet = await launch(token_budget=32)
    tokens, doomed = prompt(TOKENS), fleet.prefills[0]
    doomed.steps.shut()
    asked = asyncio.create_task(fleet.ask(tokens, mode=mode))
    await doomed.steps.pass_one(2)
    if pairs == 2:
        await fleet.host("prefill")
    await fleet.kill(doomed)
    if pairs == 1:
        with pytest.raises(errors.Unavailable) as raised:
            await asked
        assert isinstance(raised.value, errors.EngineDied | errors.NoEngines)
    else:
        answer = await asked
        assert answer.token_ids == await fleet.alone(tokens)
        assert (answer.fallbacks, answer.prefill_engine_id) == (1, fleet.prefills[1].engine_id)
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("pairs", [1, 2])
async def test_decode_refuses(launch: Launch, prompt: Prompt, mode: str, pairs: int) -> None:
    """A decode service that takes nothing new: prefill's offer is let go at once, another pair is tried."""
    fleet = await launch()
    refusing = fleet.decodes[0]
    refusing.parts.calls.draining = True
    if pairs == 1:
        with pytest.raises(errors.Draining):
            await fleet.ask(prompt(TOKENS), mode=mode)
        await fleet.settled(5)
        return
    tokens, other = prompt(TOKENS), await fleet.host("decode")
    for _ in range(2):
        answer = await fleet.ask(tokens, mode=mode)
        assert answer.token_ids == await fleet.alone(tokens)
        assert answer.decode_engine_id == other.engine_id
    await fleet.settled(5)
    assert refusing.engine.load().steps == 0


@BOTH
@pytest.mark.parametrize("pairs", [1, 2])
async def test_decode_dies_after_it_accepted(launch: Launch, prompt: Prompt, mode: str, pairs: int) -> None:
    """While its blocks are being filled: prefill's are free once the copy has ended, another decode engine answers."""
    fleet = await launch(bandwidth=FAST)
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    fleet.link.shut()
    asked = asyncio.create_task(fleet.ask(tokens, mode=mode))
    await fleet.link.reached()
    if pairs == 2:
        await fleet.host("decode")
    await fleet.kill(doomed)
    assert fleet.copying()
    fleet.link.open()
    if pairs == 1:
        with pytest.raises(errors.Unavailable):
            await asked
    else:
        answer = await asked
        assert answer.token_ids == await fleet.alone(tokens)
        assert (answer.fallbacks, answer.decode_engine_id) == (1, fleet.decodes[1].engine_id)
    await fleet.settled(5)


@BOTH
async def test_prefill_dies_during_a_transfer(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Decode's blocks are quarantined until the copy from the dead engine's memory has ended; the request goes to
    another prefill engine."""
    fleet = await launch(bandwidth=FAST)
    tokens, doomed = prompt(TOKENS), fleet.prefills[0]
    fleet.link.shut()
    asked = asyncio.create_task(fleet.ask(tokens, mode=mode))
    await fleet.link.reached()
    await fleet.host("prefill")
    await fleet.kill(doomed)
    assert fleet.copying()
    fleet.link.open()
    answer = await asked
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.fallbacks, answer.prefill_engine_id) == (1, fleet.prefills[1].engine_id)
    await fleet.settled(5)


@BOTH
async def test_decode_dies_in_the_middle_of_an_answer(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Tokens are out and no other decode engine is there: the stream ends with a typed error, over both faces."""
    fleet = await launch()
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    stream = fleet.stream(tokens, mode=mode, max_tokens=3000)
    await anext(stream)
    body = {"prompt": list(tokens), "max_tokens": 3000, "stream": True, "pdserve": {"mode": mode}}
    async with fleet.http.post("/v1/completions", json=body) as response:
        await response.content.readline()
        doomed.steps.shut()
        await doomed.steps.reached()
        await fleet.kill(doomed)
        rest = await response.content.read()
    assert b'"code":"ENGINE_DIED"' in rest
    assert b"[DONE]" not in rest
    with pytest.raises(errors.EngineDied):
        await stream.completion()
    await fleet.settled(5)


@BOTH
async def test_a_transport_that_stalls(launch: Launch, prompt: Prompt, mode: str) -> None:
    """A copy that neither ends nor can be cancelled: the transfer's deadline fails the request with a typed error,
    the fence's deadline tears the session down, and only then are the blocks free."""
    fleet = await launch(bandwidth=FAST, limits=Limits(transfer=1.0, fence=0.2))
    fleet.may_expire = True
    fleet.faults.script += [Fault.STALL]
    with pytest.raises(errors.TransferExpired):
        await fleet.ask(prompt(TOKENS), mode=mode)
    await fleet.settled(5)
    tokens = prompt(TOKENS)
    assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)
