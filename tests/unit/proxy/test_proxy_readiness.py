"""When a proxy says that it is ready: /health and gRPC's health say the same, and mean that a request could be placed;
and what its faces do with requests while it is not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import AsyncClient, Retry
from pdserve.proxy.readiness import Readiness
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import Draining, NoEngines, UnknownModel

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = 600.0
"""Seconds of hold that no test waits for."""
SERVICES = ("", "pdserve.api.serving.v1.Inference")


@dataclass
class Asked:
    """A proxy and who asks it."""

    deployment: Any
    session: aiohttp.ClientSession
    client: AsyncClient
    channel: grpc.aio.Channel

    async def health(self) -> tuple[int, Any]:
        """Status and body of /health."""
        async with self.session.get("/health") as response:
            return response.status, await response.json()

    async def says(self, ready: bool) -> str:
        """Waits until both faces say so; what /health said."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        wanted = SERVING if ready else NOT_SERVING
        async with asyncio.timeout(10):
            for service in SERVICES:
                watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
                async for told in watch:
                    if told.status == wanted:
                        break
                watch.cancel()
        status, body = await self.health()
        assert status == (200 if ready else 503), body
        if ready:
            return ", ".join(body["models"])
        return f"{body['error']['code']}: {body['error']['message']}"

    async def post(self, **body: Any) -> tuple[int, Any]:
        """A completion over HTTP."""
        async with self.session.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **body}) as response:
            return response.status, await response.json()

    def queued(self) -> int:
        """Requests that wait."""
        topology = self.deployment.app.inference.topology()
        assert topology.in_flight == 0, "what waits for an engine is not counted twice"
        return int(topology.queued)


@pytest.fixture
async def asking(deploy: Any) -> AsyncIterator[Any]:
    """Makes a proxy with clients."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings: Any) -> Asked:
            deployment = await deploy(**settings)
            where = deployment.app.addresses
            return Asked(
                deployment,
                await stack.enter_async_context(aiohttp.ClientSession(f"http://{where.http}")),
                await stack.enter_async_context(AsyncClient(where.grpc, retry=Retry(attempts=1))),
                await stack.enter_async_context(aio_channel(where.grpc)),
            )

        yield make


# -- ready or not ---------------------------------------------------------------------------


async def test_one_kind_of_engine_is_not_enough(asking: Any) -> None:
    """Not ready without engines, not with prefill alone; with a pair it is, until decode is gone."""
    asked = await asking()
    assert await asked.says(False) == "NO_ENGINES: no engine is registered"
    await asked.deployment.engine("prefill")
    assert "fake: no prefill and decode pair can be routed to for route split: 1 prefill" in await asked.says(False)
    decode = await asked.deployment.engine("decode")
    assert await asked.says(True) == "fake"
    assert (await decode.beat(state="draining")).ok
    assert "1 prefill, 0 decode" in await asked.says(False)
    assert (await decode.beat()).ok
    assert await asked.says(True) == "fake"
    await decode.stop()
    assert "1 prefill, 0 decode" in await asked.says(False)


@pytest.mark.parametrize(("route", "ready"), [("split", False), ("split_or_colocated", True), ("colocated", True)])
async def test_an_engine_that_serves_alone_counts_where_the_route_allows_it(
    asking: Any, route: str, ready: bool
) -> None:
    """By the proxy's own route: what a request gets that does not say one."""
    asked = await asking(route=route)
    await asked.deployment.engine("both")
    assert ("fake" in await asked.says(ready)) is True


async def test_halves_of_two_models_are_no_pair(asking: Any) -> None:
    """Prefill of one model and decode of another: not ready, and both are named; nor are two that do not match."""
    asked = await asking()
    await asked.deployment.engine("prefill", model="a")
    await asked.deployment.engine("decode", model="b")
    said = await asked.says(False)
    assert "a: no prefill" in said
    assert "b: no prefill" in said
    await asked.deployment.engine("decode", model="a", identity={"kv_dtype": "fp8"})
    assert "may exchange KV" in await asked.says(False)
    await asked.deployment.engine("prefill", model="b")
    assert await asked.says(True) == "b"


async def test_a_proxy_that_drains_is_not_ready(asking: Any) -> None:
    """From then on, whatever its engines do."""
    asked = await asking()
    await asked.deployment.engine("prefill")
    await asked.deployment.engine("decode")
    await asked.says(True)
    await asked.deployment.app.drain()
    assert (await asked.says(False)).startswith("DRAINING")
    await asked.deployment.engine("decode")
    assert (await asked.says(False)).startswith("DRAINING")


async def test_the_last_word_is_the_newest() -> None:
    """A telling that takes its time is over before the next begins: an old answer never comes after a new one."""
    told: list[bool] = []
    why: list[NoEngines] = []
    telling, go_on = asyncio.Event(), asyncio.Event()

    def check() -> None:
        if why:
            raise why[0]

    async def tell(ready: bool) -> None:
        telling.set()
        if ready:  # the first one, which is held up
            await go_on.wait()
        told.append(ready)

    readiness = Readiness(check, tell)
    running = asyncio.create_task(readiness.run())
    readiness.changed()
    await telling.wait()
    why.append(NoEngines("gone"))
    last = asyncio.create_task(readiness.update())
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == []
    go_on.set()
    await last
    assert told == [True, False]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# -- what is asked meanwhile ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_requests_of_both_faces_wait_for_the_engine(asking: Any, mode: str) -> None:
    """Decode comes later: both are answered, and what they waited is in `admit`."""
    asked = await asking(hold_timeout=LONG)
    await asked.deployment.engine("prefill")
    loop = asyncio.get_running_loop()
    came = loop.time()
    over_grpc = asyncio.create_task(asked.client.generate("hello", max_tokens=2, mode=mode))
    over_http = asyncio.create_task(asked.post(pdserve={"mode": mode}))
    await asked.deployment.until(lambda: asked.queued() == 2)
    until_held = loop.time() - came
    await asyncio.sleep(0.05)
    await asked.deployment.engine("decode")
    answer, (status, body) = await asyncio.gather(over_grpc, over_http)
    assert (answer.text, status, body["choices"][0]["text"]) == ("ab", 200, "ab")
    assert 0.05 <= answer.timings.parts["admit"] <= answer.timings.ttft_seconds
    assert answer.timings.parts["tokenize"] <= until_held
    await asked.deployment.app.drain()
    assert asked.deployment.held() == 0


async def test_a_new_proxy_waits_for_its_first_engines(asking: Any) -> None:
    """Nothing has ever registered: which models there are is not known yet, so nothing is refused for its model; then
    the one that is not served is."""
    asked = await asking(hold_timeout=LONG)
    good = asyncio.create_task(asked.client.generate("hello", model="fake", max_tokens=2))
    bad = asyncio.create_task(asked.client.generate("hello", model="other", max_tokens=2))
    await asked.deployment.until(lambda: asked.queued() == 2)
    await asked.deployment.engine("prefill")
    with pytest.raises(UnknownModel):
        await bad
    await asked.deployment.engine("decode")
    assert (await good).text == "ab"


async def test_an_unknown_model_is_refused_at_once(asking: Any) -> None:
    """Also while the known one has no pair: it would be refused after the wait as well."""
    asked = await asking(hold_timeout=LONG)
    await asked.deployment.engine("prefill")
    with pytest.raises(UnknownModel):
        await asked.client.generate("hello", model="other", max_tokens=2)
    status, body = await asked.post(model="other")
    assert (status, body["error"]["code"]) == (404, "UNKNOWN_MODEL")
    assert asked.queued() == 0


async def test_a_model_whose_engines_have_left_is_known(asking: Any) -> None:
    """Beside another model that is served: its requests wait for it, and are not told that there is no such model."""
    asked = await asking(hold_timeout=LONG, route="colocated")
    await asked.deployment.engine("both", model="stays")
    goes = await asked.deployment.engine("both", model="goes")
    await goes.stop()
    await asked.deployment.until(lambda: asked.deployment.app.registry.get(goes.engine_id) is None)
    waits = asyncio.create_task(asked.client.generate("hello", model="goes", max_tokens=2))
    await asked.deployment.until(lambda: asked.queued() == 1)
    assert (await asked.client.generate("hello", model="stays", max_tokens=2)).text == "ab"
    await asked.deployment.engine("both", model="goes")
    assert (await waits).text == "ab"


async def test_who_names_no_model_means_what_is_served(asking: Any) -> None:
    """A model that was replaced by another is remembered, and is no reason to ask which one is meant."""
    asked = await asking(hold_timeout=LONG, route="colocated")
    goes = await asked.deployment.engine("both", model="goes")
    await goes.stop()
    await asked.deployment.until(lambda: asked.deployment.app.registry.get(goes.engine_id) is None)
    await asked.deployment.engine("both", model="comes")
    assert (await asked.client.generate("hello", max_tokens=2)).text == "ab"


async def test_too_many_are_refused_over_both_faces(asking: Any) -> None:
    """NO_ENGINES and 503 at once, with one waiting that may."""
    asked = await asking(hold_timeout=LONG, hold_queue=1)
    await asked.deployment.engine("prefill")
    first = asyncio.create_task(asked.client.generate("hello", max_tokens=2))
    await asked.deployment.until(lambda: asked.queued() == 1)
    with pytest.raises(NoEngines, match="1 requests wait"):
        await asked.client.generate("hello", max_tokens=2)
    status, body = await asked.post()
    assert (status, body["error"]["code"]) == (503, "NO_ENGINES")
    await asked.deployment.engine("decode")
    assert (await first).text == "ab"


@pytest.mark.parametrize("face", ["grpc", "http", "http stream"])
async def test_a_client_that_goes_away_is_waited_for_no_longer(asking: Any, face: str) -> None:
    """Its place is free at once, and the engine that comes is not asked."""
    asked = await asking(hold_timeout=LONG)
    prefill = await asked.deployment.engine("prefill")
    work = asked.client.generate("x", max_tokens=2) if face == "grpc" else asked.post(stream=face == "http stream")
    request = asyncio.create_task(work)
    await asked.deployment.until(lambda: asked.queued() == 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asked.deployment.until(lambda: asked.queued() == 0)
    decode = await asked.deployment.engine("decode")
    assert (await asked.client.generate("hello", max_tokens=2)).text == "ab"
    assert (len(prefill.prefills), len(decode.decodes)) == (1, 1)


async def test_a_proxy_that_drains_sends_who_waits_elsewhere(asking: Any) -> None:
    """DRAINING at once: it has begun nothing, and another proxy may have engines."""
    asked = await asking(hold_timeout=LONG)
    await asked.deployment.engine("prefill")
    waits = asyncio.create_task(asked.client.generate("hello", max_tokens=2))
    await asked.deployment.until(lambda: asked.queued() == 1)
    await asked.deployment.app.drain()
    with pytest.raises(Draining):
        await waits
