"""Parts of the fleet that leave on purpose, or whose time is over: drains lose no request, a proxy that ends gives
everything back, a client's deadline is kept in every phase."""

import asyncio

import pytest

from pdserve.rpc import errors
from tests.sim.fleet import Launch, Prompt

BOTH = pytest.mark.parametrize("mode", ["read", "write"])


@BOTH
async def test_a_drain_under_load_loses_nothing(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Of two pairs one drains, prefill first, while eight clients keep asking: every request is answered, also those
    that reach a service after it has begun to drain, and the drained services have nothing left."""
    fleet = await launch(prefills=2, decodes=2, token_budget=64)
    going = [fleet.prefills[0], fleet.decodes[0]]
    over = asyncio.Event()

    async def client() -> int:
        count = 0
        while not over.is_set():
            tokens = prompt(100)
            answer = await fleet.ask(tokens, mode=mode, max_tokens=20)
            assert answer.token_ids == await fleet.alone(tokens, 20)
            count += 1
        return count

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for service in going:
        await fleet.until(lambda service=service: service.engine.load().running > 0)  # type: ignore[misc]  # bound now
        await fleet.leave(service)
    over.set()
    assert sum(await asyncio.gather(*clients)) > 8
    assert all(service.task.done() for service in going)


@BOTH
@pytest.mark.parametrize("phase", ["computing", "transfer", "decoding"])
async def test_a_proxy_that_ends(launch: Launch, prompt: Prompt, mode: str, phase: str) -> None:
    """Its open requests fail with a typed error; the services learn of it by the end of their calls alone, and give
    back all that they held for it."""
    fleet = await launch(bandwidth=1e12, token_budget=64)
    gate = {"computing": fleet.prefills[0].steps, "transfer": fleet.link, "decoding": fleet.decodes[0].steps}[phase]
    stream = fleet.stream(prompt(200), mode=mode, max_tokens=2000)
    if phase == "decoding":
        await anext(stream)
    gate.shut()
    asked = asyncio.create_task(stream.completion())
    await gate.reached()
    await fleet.proxy.aclose()
    with pytest.raises((errors.Unavailable, errors.RequestCancelled)):
        await asked
    gate.open()
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("phase", ["queued", "computing", "transfer", "decoding"])
async def test_a_deadline_that_passes(launch: Launch, prompt: Prompt, mode: str, phase: str) -> None:
    """DEADLINE_EXCEEDED, and both legs are over with it."""
    fleet = await launch(bandwidth=1e12, token_budget=64, num_blocks=32)
    gates = {"transfer": fleet.link, "decoding": fleet.decodes[0].steps}
    gate = gates.get(phase, fleet.prefills[0].steps)
    gate.shut()
    hog = asyncio.create_task(fleet.ask(prompt(500))) if phase == "queued" else None
    if hog is not None:
        await gate.reached()
    with pytest.raises(errors.DeadlinePassed):
        await fleet.ask(prompt(200), mode=mode, timeout=0.3)
    await fleet.until(lambda: fleet.proxy.inference.topology().in_flight == (1 if hog else 0))
    gate.open()
    if hog is not None:
        await hog
    await fleet.settled(5)
