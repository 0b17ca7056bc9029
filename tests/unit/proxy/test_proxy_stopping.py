"""A proxy that stops: what it still has and what still comes ends with DRAINING, over both faces."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
from structlog.testing import capture_logs

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.client import AsyncClient, Retry
from pdserve.proxy.testing import FakeEngine, Rig, echo_decode
from pdserve.proxy.testing.rig import ready, tokens
from pdserve.proxy.types import Delta, OnFailure, Sampling
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import Draining, EngineDied, PdserveError
from pdserve.rpc.status import to_error

BOTH = pytest.mark.parametrize("begun", [False, True])


@pytest.fixture
def endless(pair: Any) -> Any:
    """A deployment whose decode gives one token and no more; with its engines."""
    _, _, decode = pair

    async def one(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        async for message in echo_decode(engine, request):
            yield message
            break
        await asyncio.Event().wait()

    decode.on_decode = one
    return pair


def silent(engine: FakeEngine) -> asyncio.Event:
    """Makes decode say nothing; set once it was asked."""
    asked = asyncio.Event()

    async def nothing(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        asked.set()
        await asyncio.Event().wait()
        yield

    engine.on_decode = nothing
    return asked


async def rest_of(call: Any) -> PdserveError:
    """The typed error that ends a call."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return to_error(error)
    raise AssertionError("the call ended well")


@BOTH
async def test_what_still_runs_ends_with_draining_over_grpc(endless: Any, begun: bool) -> None:
    """Not a bare CANCELLED: the reason says that another proxy may answer. Both legs are ended."""
    deployment, prefill, decode = endless
    asked = None if begun else silent(decode)
    async with aio_channel(deployment.app.addresses.grpc) as channel:
        stub: Any = serving_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(
            serving_pb2.GenerateRequest(text="hello", sampling=common_pb2.SamplingParams(max_tokens=3))
        )
        await call.read()
        if asked is None:
            assert (await call.read()).WhichOneof("event") == "delta"
        else:
            await asked.wait()
        with capture_logs() as lines:
            ending = asyncio.create_task(rest_of(call))
            await deployment.app.aclose()
            error = await ending
    assert (error.reason, error.retryable) == ("DRAINING", True)
    assert "stopped" in error.message
    ended = [line for line in lines if line["event"] == "request_ended"]
    assert [(line["outcome"], line["reason"]) for line in ended] == [("failed", "DRAINING")]
    await decode.idle.wait()
    await prefill.idle.wait()


@BOTH
async def test_what_still_runs_ends_with_draining_over_http(endless: Any, begun: bool) -> None:
    """Streamed: an event with the reason and no [DONE]; before the first token: status 503."""
    deployment, _, decode = endless
    asked = None if begun else silent(decode)
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    async with aiohttp.ClientSession() as session:
        posting = asyncio.create_task(session.post(f"http://{deployment.app.addresses.http}/v1/completions", json=body))
        if asked is None:
            response = await posting
            assert b"data: " in await response.content.readline()
            closing = asyncio.create_task(deployment.app.aclose())
            raw = await response.content.read()
            assert b"[DONE]" not in raw
            error = json.loads(raw.strip().removeprefix(b"data: "))["error"]
        else:
            await asked.wait()
            closing = asyncio.create_task(deployment.app.aclose())
            response = await posting
            assert response.status == 503
            error = (await response.json())["error"]
        await closing
    assert error["code"] == "DRAINING"


async def test_new_requests_are_told_during_the_drain(endless: Any) -> None:
    """Over both faces while an open one goes on; /health says the same, for whoever balances the load."""
    deployment, _, _ = endless
    where = deployment.app.addresses
    async with (
        AsyncClient(where.grpc, retry=Retry(attempts=1)) as client,
        aiohttp.ClientSession(f"http://{where.http}") as session,
    ):
        stream = client.stream("hello", max_tokens=3)
        await anext(stream)
        draining = asyncio.create_task(deployment.app.drain())
        with pytest.raises(Draining):
            await client.generate("hello", max_tokens=3)
        for refused in (session.post("/v1/completions", json={"prompt": "x"}), session.get("/health")):
            async with refused as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "DRAINING"
        assert not draining.done()
        await stream.aclose()
        await draining


async def test_who_waits_for_credits_is_told() -> None:
    """Nobody's deadline is waited for, nor that the credits come, which somebody else has."""
    rig = Rig()
    rig.ledger.reported("d0", 0)
    waits = rig.start(rig.job())
    await rig.queued(1)
    rig.driver.stop("stopped")
    with pytest.raises(Draining, match="stopped"):
        await waits.task
    with pytest.raises(Draining, match="stopped"):
        await rig.start(rig.job()).task
    await rig.nothing_is_held()


async def test_who_waits_to_recompute_is_told() -> None:
    """Behind one that has the only permit: both end, one after the other."""
    rig = Rig(recomputes=1)
    runs = [rig.start(rig.job(on_failure=OnFailure.RECOMPUTE)) for _ in range(2)]
    for number in range(2):
        (await rig.legs.nth_prefill(number)).fail(EngineDied("gone"))
    await rig.legs.nth_decode(0)
    rig.driver.stop("stopped")
    for run in runs:
        with pytest.raises(Draining):
            await run.task
    await rig.nothing_is_held()


async def test_a_stopped_answer_is_not_taken_up_elsewhere() -> None:
    """There would be a pair for it; but it is the proxy that goes."""
    rig = Rig(prefills=2, decodes=2)
    run = rig.start(rig.job(sampling=Sampling(max_tokens=4, temperature=0.0)))
    (await rig.legs.nth_prefill(0)).say(ready())
    (await rig.legs.nth_decode(0)).say(tokens())
    await run.until(Delta)
    rig.driver.stop("stopped")
    rig.driver.stop("stopped")
    with pytest.raises(Draining):
        await run.task
    assert len(rig.legs.prefills) == 1
    assert (rig.ended[0].outcome.value, rig.ended[0].reason) == ("failed", "DRAINING")
    assert [(tried.reason, tried.blamed) for tried in rig.ended[0].attempts] == [("DRAINING", "")]
    await rig.nothing_is_held()
