"""A proxy that has just started does not know yet which models there are: engines find it one by one, each with its
next beat. Who asks for one that it has not heard of waits for it, for the first beats and no longer."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from pdserve.client import AsyncClient, Retry
from pdserve.proxy.registry import Registry
from pdserve.rpc.errors import NoEngines, UnknownModel
from tests.unit.proxy.test_proxy_registry import beat

LONG = 60.0
"""Seconds of hold that no test waits for."""


def test_a_registry_settles_beats_after_the_first_one() -> None:
    """By the first beat and not by the start: a proxy that nobody has found yet knows nothing, however old it is. The
    version says that something has changed."""
    registry = Registry(2.0, settle=3)
    registry.expire(1000.0)
    assert not registry.settled
    registry.beat(beat("e1"), 1000.0)
    registry.beat(beat("e2"), 1005.0)
    registry.expire(1005.9)
    assert not registry.settled
    before = registry.version
    registry.expire(1006.0)
    assert registry.settled
    assert registry.version > before
    assert Registry().settled


async def post(deployment: Any, model: str) -> tuple[int, Any]:
    """A completion over HTTP."""
    async with (
        aiohttp.ClientSession(f"http://{deployment.app.addresses.http}") as session,
        session.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "model": model}) as response,
    ):
        return response.status, await response.json()


def asking(deployment: Any) -> AsyncClient:
    """A client that does not try again."""
    return AsyncClient(deployment.app.addresses.grpc, retry=Retry(attempts=1))


async def test_a_model_that_registers_a_moment_later_is_waited_for(deploy: Any) -> None:
    """One model is there; requests of both faces for another one, whose engine comes next, are answered. The first is
    served meanwhile."""
    deployment = await deploy(hold_timeout=LONG, route="colocated", beats_settle=3)
    await deployment.engine("both", model="first")
    async with asking(deployment) as client:
        over_grpc = asyncio.create_task(client.generate("hello", model="second", max_tokens=2))
        over_http = asyncio.create_task(post(deployment, "second"))
        await deployment.until(lambda: deployment.app.inference.topology().queued == 2)
        assert (await client.generate("hello", model="first", max_tokens=2)).text == "ab"
        await deployment.engine("both", model="second")
        status, body = await over_http
        assert ((await over_grpc).text, status, body["choices"][0]["text"]) == ("ab", 200, "ab")


async def test_a_model_that_nobody_serves_is_unknown_once_the_proxy_has_settled(deploy: Any) -> None:
    """Not before, and not only when the hold ends; by time alone, since no engine says anything more. After that it is
    so at once."""
    deployment = await deploy(
        hold_timeout=LONG, route="colocated", beat_interval=0.1, beats_missed=10_000, beats_settle=5
    )
    began = time.monotonic()
    await deployment.engine("both", model="first")
    async with asking(deployment) as client:
        with pytest.raises(UnknownModel, match="'other'; there is first"):
            await client.generate("hello", model="other", max_tokens=2)
        assert time.monotonic() - began >= 5 * 0.1
        assert deployment.app.registry.settled
    status, body = await post(deployment, "other")
    assert (status, body["error"]["code"]) == (404, "UNKNOWN_MODEL")


async def test_a_hold_that_ends_first_says_that_nobody_knows(deploy: Any) -> None:
    """NO_ENGINES, which the SDK asks again, with what is missing; and at once where nobody is held."""
    for hold, said in ((0.02, "; none came within 0.02 s"), (0.0, "there is first")):
        deployment = await deploy(hold_timeout=hold, route="colocated", beats_settle=3)
        await deployment.engine("both", model="first")
        async with asking(deployment) as client:
            with pytest.raises(NoEngines, match="no engine of 'other' has registered") as refused:
                await client.generate("hello", model="other", max_tokens=2)
        assert refused.value.message.endswith(said)
        status, body = await post(deployment, "other")
        assert (status, body["error"]["code"]) == (503, "NO_ENGINES")
