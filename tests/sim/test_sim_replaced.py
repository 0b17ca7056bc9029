"""The only engine of a kind is replaced, or dies and comes back: who asks meanwhile waits for the next one, and what is
under way ends well. No client sees an error."""

import asyncio

import pytest

from pdserve.client import AsyncStream, Completion
from pdserve.rpc import errors
from tests.sim.fleet import Launch, Prompt
from tests.sim.hosted import Service

BOTH = pytest.mark.parametrize("mode", ["read", "write"])
POLICIES = pytest.mark.parametrize("policy", ["fail", "recompute"])
HOLD_S = 600.0
"""Longer than any test: nobody is refused since its wait was too long."""


@BOTH
@POLICIES
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_only_engine_is_replaced_under_load(
    launch: Launch, prompt: Prompt, mode: str, policy: str, role: str
) -> None:
    """It drains and ends, and only when it has, the next one starts, while six clients keep asking: every request is
    answered, with the right tokens; all six have waited."""
    fleet = await launch(token_budget=64, proxy={"hold_timeout": HOLD_S, "on_failure": policy})
    over = asyncio.Event()
    counts = [0] * 6

    async def client(number: int) -> None:
        while not over.is_set():
            tokens = prompt(100)
            answer = await fleet.ask(tokens, mode=mode, max_tokens=20)
            assert answer.token_ids == await fleet.alone(tokens, 20)
            counts[number] += 1

    clients = [asyncio.create_task(client(number)) for number in range(len(counts))]
    going = (fleet.prefills if role == "prefill" else fleet.decodes)[0]
    await fleet.until(lambda: going.engine.load().running > 0)
    await fleet.leave(going)
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == len(counts))
    before = list(counts)
    came = await fleet.host(role)
    await fleet.until(lambda: all(now > then for now, then in zip(counts, before, strict=True)))
    over.set()
    await asyncio.gather(*clients)
    assert came.engine.load().steps > 0
    await fleet.settled(5)


async def begun(decode: Service, stream: AsyncStream) -> asyncio.Task[Completion]:
    """The rest of an answer whose first token is here; decode is held in the step after it."""
    decode.steps.shut()
    first = asyncio.ensure_future(anext(stream))
    await decode.steps.pass_one()
    await first
    await decode.steps.reached()
    return asyncio.create_task(stream.completion())


@BOTH
async def test_a_stream_outlives_the_only_decode_engine(launch: Launch, prompt: Prompt, mode: str) -> None:
    """It dies in the middle of an answer. The answer goes on on the one that comes later, with the tokens that one
    engine alone would have said."""
    fleet = await launch(proxy={"hold_timeout": HOLD_S})
    doomed, tokens = fleet.decodes[0], prompt(100)
    stream = fleet.stream(tokens, mode=mode, max_tokens=20)
    asked = await begun(doomed, stream)
    await fleet.kill(doomed)
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 1)
    assert not asked.done()
    came = await fleet.host("decode")
    answer = await asked
    assert answer.token_ids == await fleet.alone(tokens, 20)
    assert (answer.continuations, answer.decode_engine_id) == (1, came.engine_id)
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_hold_has_an_end(launch: Launch, prompt: Prompt, mode: str, role: str) -> None:
    """Nobody comes: NO_ENGINES after the hold, DEADLINE_EXCEEDED where the request's own time is shorter; and nothing
    is left of either."""
    fleet = await launch(proxy={"hold_timeout": 0.3})
    await fleet.leave((fleet.prefills if role == "prefill" else fleet.decodes)[0])
    began = asyncio.get_running_loop().time()
    with pytest.raises(errors.NoEngines, match=r"none came within 0\.3 s"):
        await fleet.ask(prompt(40), mode=mode)
    assert asyncio.get_running_loop().time() - began >= 0.3
    with pytest.raises(errors.DeadlinePassed):
        await fleet.ask(prompt(40), mode=mode, timeout=0.1)
    await fleet.settled(5)


@BOTH
async def test_the_gap_begins_with_the_drain(launch: Launch, prompt: Prompt, mode: str) -> None:
    """While the only decode engine still finishes an answer, the next request waits for its successor already: refused
    when its hold is over, answered where it lasts. The answer under way ends well, with the right tokens."""
    fleet = await launch(proxy={"hold_timeout": 0.1})
    going, tokens = fleet.decodes[0], prompt(100)
    stream = fleet.stream(tokens, mode=mode, max_tokens=20)
    last = await begun(going, stream)
    going.shutdown.request()
    await fleet.until(lambda: not fleet.routable(going))
    with pytest.raises(errors.NoEngines, match=r"0 decode.*none came within 0\.1 s"):
        await fleet.ask(prompt(40), mode=mode)
    assert not last.done()
    going.steps.open()
    assert (await last).token_ids == await fleet.alone(tokens, 20)
    await fleet.leave(going)
    await fleet.host("decode")
    assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)
    await fleet.settled(5)


@BOTH
async def test_what_waited_in_the_gap_says_so(launch: Launch, prompt: Prompt, mode: str) -> None:
    """The whole rest of the gap is in the part `admit` of its answer, and it is no fallback."""
    fleet = await launch(proxy={"hold_timeout": HOLD_S})
    await fleet.leave(fleet.decodes[0])
    asked = asyncio.create_task(fleet.ask(prompt(40), mode=mode))
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 1)
    await asyncio.sleep(0.05)
    await fleet.host("decode")
    answer = await asked
    assert (answer.fallbacks, answer.recomputed_tokens) == (0, 0)
    assert 0.05 <= answer.timings.parts["admit"] <= answer.timings.ttft_seconds
    await fleet.settled(5)


@BOTH
async def test_a_client_goes_while_its_request_is_held(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Over both faces: nothing is left in the proxy, and the engine that comes computes nothing for it."""
    fleet = await launch(proxy={"hold_timeout": HOLD_S})
    await fleet.leave(fleet.decodes[0])
    body = {"prompt": list(prompt(40)), "max_tokens": 8, "pdserve": {"mode": mode}}
    asked = [asyncio.create_task(fleet.ask(prompt(40), mode=mode)), asyncio.create_task(fleet.post(body))]
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 2)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 0)
    came = await fleet.host("decode")
    tokens = prompt(40)
    assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)
    assert fleet.ended() == {"landed": 1, "released": 1}
    assert came.engine.load().running == 0
