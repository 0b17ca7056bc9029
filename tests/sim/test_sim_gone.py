"""A client that goes away, in each phase of its request: both legs end and every block comes back at once. No
deadline of kvd helps (all are minutes), and the gates say exactly how far the request had come."""

import asyncio
import random
from typing import Any

import pytest

from tests.sim.fleet import Fleet, Launch, Prompt

TOKENS = 200
AT_ONCE_S = 5.0
"""Of a busy box; the shortest deadline that could hide a leak is a minute."""


class Client:
    """Over one of the two faces: begins a request, and goes away."""

    def __init__(self, fleet: Fleet, face: str, mode: str, tokens: tuple[int, ...]) -> None:
        self._fleet = fleet
        self._face = face
        self.mode = mode
        self._tokens = tokens
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Sends the request."""
        work = self._grpc() if self._face == "grpc" else self._http(stream=self._face == "http stream")
        self._task = asyncio.create_task(work)

    async def go(self) -> None:
        """Hangs up, before the answer is complete."""
        assert not self._over()
        await self.leave()

    async def leave(self) -> None:
        """Hangs up, whether or not the answer is complete."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _over(self) -> bool:
        return self._task is None or self._task.done()

    async def _grpc(self) -> None:
        stream = self._fleet.stream(self._tokens, mode=self.mode, max_tokens=20)
        async with stream:
            async for _ in stream:
                pass

    async def _http(self, *, stream: bool) -> None:
        body = {
            "prompt": list(self._tokens),
            "max_tokens": 20,
            "temperature": 0,
            "stream": stream,
            "pdserve": {"mode": self.mode},
        }
        async with self._fleet.http.post("/v1/completions", json=body) as response:
            await response.read()


async def queued(fleet: Fleet, prompt: Prompt, client: Client) -> None:
    """Waits for credits, behind a request that has them all."""
    fleet.prefills[0].steps.shut()
    hog = asyncio.create_task(fleet.ask(prompt(500), max_tokens=8))
    await fleet.prefills[0].steps.reached()
    client.begin()
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 1)
    await client.go()
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 0)
    fleet.prefills[0].steps.open()
    await hog


async def prefill_queued(fleet: Fleet, prompt: Prompt, client: Client) -> None:
    """At the prefill engine, behind a step that does not end."""
    fleet.prefills[0].steps.shut()
    local = asyncio.create_task(fleet.local(fleet.prefills[0], prompt(20), 1))
    await fleet.prefills[0].steps.reached()
    client.begin()
    await fleet.until(lambda: fleet.prefills[0].engine.load().waiting == 1)
    await client.go()
    await fleet.until(lambda: not len(fleet.prefills[0].parts.calls))
    fleet.prefills[0].steps.open()
    await local


async def computing(fleet: Fleet, prompt: Prompt, client: Client) -> None:
    """In the second of four chunks."""
    steps = fleet.prefills[0].steps
    steps.shut()
    client.begin()
    await steps.pass_one(1 if client.mode == "read" else 5)
    await steps.reached()
    await client.go()
    await fleet.until(lambda: not len(fleet.prefills[0].parts.calls))
    steps.open()


async def transfer(fleet: Fleet, prompt: Prompt, client: Client) -> None:
    """While the link carries its blocks: they stay held until it has let go of them."""
    fleet.link.shut()
    client.begin()
    await fleet.link.reached()
    await client.go()
    await fleet.until(lambda: not any(len(s.parts.calls) for s in (*fleet.prefills, *fleet.decodes)))
    assert fleet.copying()
    load = fleet.decodes[0].engine.load()
    assert load.free_kv_tokens < load.total_kv_tokens
    fleet.link.open()


async def decoding(fleet: Fleet, prompt: Prompt, client: Client) -> None:
    """In the third step of its answer."""
    steps = fleet.decodes[0].steps
    steps.shut()
    client.begin()
    await steps.pass_one(3)
    await steps.reached()
    await client.go()
    await fleet.until(lambda: not len(fleet.decodes[0].parts.calls))
    steps.open()


FACES = ["grpc", "http stream", "http"]
PHASES = [queued, prefill_queued, computing, transfer, decoding]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_a_client_that_goes_away(launch: Launch, prompt: Prompt, phase: Any, mode: str, face: str) -> None:
    """Whatever the phase, the mode and the face; and the next request is answered."""
    fleet = await launch(num_blocks=32, token_budget=64, bandwidth=1e12, prefix_cache=False)
    await phase(fleet, prompt, Client(fleet, face, mode, prompt(TOKENS)))
    await fleet.settled(AT_ONCE_S)
    tokens = prompt(TOKENS)
    assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_many_clients_that_go_away_together(
    launch: Launch, prompt: Prompt, mode: str, rng: random.Random
) -> None:
    """Forty at once, each after as many turns of the loop as the seed says; whatever they had is back."""
    fleet = await launch(prefills=2, decodes=2, num_blocks=64, token_budget=64)
    clients = [Client(fleet, rng.choice(FACES), mode, prompt(rng.randrange(1, 300))) for _ in range(40)]

    async def visit(client: Client, seconds: float) -> None:
        client.begin()
        await asyncio.sleep(seconds)
        await client.leave()

    await asyncio.gather(*(visit(client, rng.uniform(0.0, 0.3)) for client in clients))
    await fleet.settled(AT_ONCE_S)
    tokens = prompt(TOKENS)
    assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)
