"""A kvd that drains, while its engines and the proxy go on: what is open ends well, no hand-over is begun, and whoever
may have its prompt computed at decode gets an answer. Without a beat the proxy hears of the drain from the first
request's legs; with beats before any request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.proxy import attempt
from pdserve.proxy.types import OnFailure
from pdserve.rpc import errors
from pdserve.runtime.failpoints import Point
from pdserve.runtime.testing import Gate
from tests.sim.deployment import STEADY
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.waiting import WAIT_S

BOTH = pytest.mark.parametrize("mode", ["read", "write"])
HEARD = pytest.mark.parametrize("heard", [False, True], ids=["not_heard", "heard"])
HOW = pytest.mark.parametrize("how", ["drain", "sigterm"])
TOKENS = 200
BEAT = 0.1
FOR_EVER = {"hold_timeout": 300.0}
"""Of the proxy: a request that waits for engines outlives the test's patience."""


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Passed once a READ, when its prompt is on offer and decode is about to be asked."""
    gate = Gate()

    async def go_by(point: Point) -> None:
        if point is Point.PROXY_BETWEEN:
            await gate.sleep(0.0)

    monkeypatch.setattr(attempt, "failpoint", go_by)
    return gate


async def drain(fleet: Fleet, *, undo: bool = False, seconds: float = 0.0) -> kvd_pb2.DrainResponse:
    """`pdserve kvd drain`."""
    stub = kvd_pb2_grpc.OperatorStub(await fleet.channel(f"unix:{fleet.kvd.socket}"))
    return await stub.Drain(kvd_pb2.DrainRequest(deadline_seconds=seconds, undo=undo))


async def heard_of_it(fleet: Fleet, *, draining: bool = True) -> None:
    """Waits for the engines' beats."""
    await fleet.until(lambda: all(e.kvd_draining is draining for e in fleet.proxy.registry.entries()))


@asynccontextmanager
async def draining_with_a_transfer_open(fleet: Fleet, prompt: Prompt, mode: str, how: str) -> AsyncIterator[None]:
    """The open one ends well afterwards, and then the drain does."""
    tokens = prompt(TOKENS)
    fleet.link.shut()
    first = asyncio.create_task(fleet.ask(tokens, mode=mode))
    await fleet.link.reached()
    # What kvd does at its first SIGTERM; the second half, its end, is the fleet's to arrange.
    over = asyncio.create_task(fleet.kvd.node.drained(WAIT_S, stopping=True)) if how == "sigterm" else None
    if over is None:
        assert (await drain(fleet)).remaining == 1
    await fleet.until(lambda: fleet.kvd.node.transfers.draining)
    yield
    assert fleet.copying(), "the drain has taken an open transfer with it"
    fleet.link.open()
    answer = await first
    assert (answer.token_ids, answer.recomputed_tokens) == (await fleet.alone(tokens), 0)
    assert answer.kv_bytes > 0
    assert (await over if over else (await drain(fleet, seconds=WAIT_S)).remaining) == 0


@BOTH
@HOW
@HEARD
async def test_prompts_are_computed_at_decode_meanwhile(
    launch: Launch, prompt: Prompt, mode: str, how: str, heard: bool
) -> None:
    """Over both faces, at once, with the right tokens; nothing new is begun at kvd once the proxy has heard."""
    fleet = await launch(bandwidth=1e12, beat_seconds=BEAT if heard else STEADY, proxy=FOR_EVER)
    async with draining_with_a_transfer_open(fleet, prompt, mode, how):
        if heard:
            await heard_of_it(fleet)
        tokens, before = prompt(TOKENS), fleet.ended()
        answer = await fleet.ask(tokens, mode=mode, on_failure="recompute")
        assert answer.token_ids == await fleet.alone(tokens)
        assert (answer.recomputed_tokens, answer.fallbacks) == (TOKENS, 0 if heard else 1)
        body = {"prompt": list(prompt(TOKENS)), "max_tokens": 4, "pdserve": {"mode": mode, "on_failure": "recompute"}}
        status, said = await fleet.post(body)
        assert (status, said["usage"]["completion_tokens"]) == (200, 4)
        if heard:
            assert fleet.ended() == before, "a hand-over was begun with a kvd that drains"
    await fleet.settled(5)


@BOTH
@HOW
@HEARD
async def test_who_may_not_recompute_is_told_at_once(
    launch: Launch, prompt: Prompt, mode: str, how: str, heard: bool
) -> None:
    """KVD_UNAVAILABLE, which says that kvd drains; nobody is held for engines, of which none is missing."""
    fleet = await launch(bandwidth=1e12, beat_seconds=BEAT if heard else STEADY, proxy=FOR_EVER)
    async with draining_with_a_transfer_open(fleet, prompt, mode, how):
        if heard:
            await heard_of_it(fleet)
        with pytest.raises(errors.KvdUnavailable, match="drains"):
            await fleet.ask(prompt(TOKENS), mode=mode, on_failure="fail")
        status, said = await fleet.post({"prompt": list(prompt(TOKENS)), "pdserve": {"mode": mode}})
        assert (status, said["error"]["code"]) == (503, "KVD_UNAVAILABLE")
        assert "drains" in said["error"]["message"]
    await fleet.settled(5)


async def test_an_offer_that_comes_too_late(launch: Launch, prompt: Prompt) -> None:
    """READ: kvd hears of a hand-over when its prompt is computed. One that was being computed when the drain began is
    not begun: decode computes it, and it says so where it may not."""
    fleet = await launch(token_budget=64)
    for policy in ("recompute", "fail"):
        tokens, prefill = prompt(TOKENS), fleet.prefills[0]
        prefill.steps.shut()
        asked = asyncio.create_task(fleet.ask(tokens, mode="read", on_failure=policy))
        await prefill.steps.reached()
        await drain(fleet)
        prefill.steps.open()
        if policy == "recompute":
            answer = await asked
            assert (answer.token_ids, answer.recomputed_tokens) == (await fleet.alone(tokens), TOKENS)
        else:
            with pytest.raises(errors.KvdUnavailable, match="drains"):
                await asked
        await drain(fleet, undo=True)
    await fleet.settled(5)


async def test_an_offer_that_came_in_time(launch: Launch, prompt: Prompt, between: Gate) -> None:
    """READ: its prompt was on offer when the drain began, and decode had not been asked: it is handed over."""
    fleet = await launch()
    tokens = prompt(TOKENS)
    between.shut()
    asked = asyncio.create_task(fleet.ask(tokens, mode="read"))
    await between.reached()
    await fleet.until(lambda: fleet.producers() == ["complete"])
    await drain(fleet)
    between.open()
    answer = await asked
    assert (answer.token_ids, answer.recomputed_tokens) == (await fleet.alone(tokens), 0)
    assert (await drain(fleet, seconds=WAIT_S)).remaining == 0


@BOTH
async def test_a_drain_that_is_undone(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Hand-overs are begun again, also by a proxy that had heard of the drain."""
    fleet = await launch(beat_seconds=BEAT, proxy=FOR_EVER)
    await drain(fleet)
    await heard_of_it(fleet)
    assert (await fleet.ask(prompt(TOKENS), mode=mode, on_failure="recompute")).recomputed_tokens == TOKENS
    assert not (await drain(fleet, undo=True)).draining
    await heard_of_it(fleet, draining=False)
    tokens = prompt(TOKENS)
    answer = await fleet.ask(tokens, mode=mode)
    assert (answer.token_ids, answer.recomputed_tokens, answer.fallbacks) == (await fleet.alone(tokens), 0, 0)


@BOTH
async def test_a_drained_kvd_is_asked_by_no_other_pair(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Three pairs on it, and a proxy that has heard: no engine computes for a hand-over that could not be."""
    fleet = await launch(prefills=3, decodes=3, beat_seconds=BEAT, proxy=FOR_EVER)
    await drain(fleet)
    await heard_of_it(fleet)
    with pytest.raises(errors.KvdUnavailable, match="drains"):
        await fleet.ask(prompt(TOKENS), mode=mode, on_failure="fail")
    assert (await fleet.ask(prompt(TOKENS), mode=mode, on_failure="recompute")).fallbacks == 0
    assert [service.engine.load().steps for service in fleet.prefills] == [0, 0, 0]
    assert not fleet.ended()


@pytest.mark.parametrize("policy", list(OnFailure))
async def test_health_and_status_say_so(launch: Launch, policy: OnFailure) -> None:
    """The status of every engine names its kvd's drain; health is well where prompts are computed at decode, else 503
    with the reason. Both are well again after --undo."""
    fleet = await launch(beat_seconds=BEAT, proxy={"on_failure": policy})
    await drain(fleet)
    await heard_of_it(fleet)
    assert all("kvd drains" in engine.excluded_because for engine in (await fleet.client.topology()).engines)
    async with fleet.http.get("/health") as response:
        status, said = response.status, await response.json()
    if policy is OnFailure.RECOMPUTE:
        assert (status, said["status"]) == (200, "ok")
    else:
        assert (status, said["error"]["code"]) == (503, "KVD_UNAVAILABLE")
        assert "drains" in said["error"]["message"]
    await drain(fleet, undo=True)
    await heard_of_it(fleet, draining=False)
    assert not any(engine.excluded_because for engine in (await fleet.client.topology()).engines)
    async with fleet.http.get("/health") as response:
        assert response.status == 200


async def test_an_engine_that_comes_during_a_drain(launch: Launch, prompt: Prompt) -> None:
    """It is told with its welcome, and its first beat says so."""
    fleet = await launch()
    await drain(fleet)
    late = await fleet.host("decode")
    entry = fleet.proxy.registry.get(late.engine_id)
    assert entry is not None
    assert entry.kvd_draining
    await drain(fleet, undo=True)
    assert (await fleet.ask(prompt(TOKENS))).recomputed_tokens == 0
