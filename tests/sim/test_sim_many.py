"""Two hundred requests at once over four pairs, and what turns such a test red: movers that lie, ends that are lost."""

import asyncio
import random
from typing import Any

import pytest

from pdserve.client import AsyncClient, Mode
from pdserve.decode.session import DecodeConfig
from pdserve.kvd.client.messages import End, Fenced
from pdserve.kvd.testing import Fault
from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt

MODES: tuple[Mode, ...] = ("read", "write")
FAST = 1e12  # bytes a second of a simulated link that only matters for its faults


async def test_two_hundred_requests_at_once(launch: Launch, rng: random.Random, prompt: Prompt) -> None:
    """READ and WRITE mixed, n of 1 to 3, prompts in chunks, pools that hold a few at a time: every byte is
    checked by the engines, every answer is the single engine's, every block comes back."""
    fleet = await launch(
        prefills=4, decodes=4, num_blocks=256, token_budget=256, beat_seconds=0.2, proxy={"admission_timeout": 40.0}
    )

    async def one() -> None:
        tokens = prompt(rng.randrange(1, 400))
        n, mode, most = rng.randint(1, 3), rng.choice(MODES), rng.randrange(1, 12)
        answer = await client.generate(tokens, mode=mode, n=n, max_tokens=most, temperature=0.0)
        expected = await fleet.alone(tokens, most)
        assert [choice.token_ids for choice in answer.choices] == [expected] * n
        assert (answer.mode, answer.fallbacks) == (mode, 0)

    # One that sends again: gRPC ends calls that a busy server has not come to for 30 s.
    async with AsyncClient(fleet.proxy.addresses.grpc, timeout=90.0) as client:
        await asyncio.gather(*(one() for _ in range(200)))
    await fleet.settled()
    used = [service.engine.load().steps for service in (*fleet.prefills, *fleet.decodes)]
    assert min(used) > 0, f"an engine was never used: {used}"
    assert set(fleet.ended()) == {"landed", "released"}


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_a_mover_that_lies_is_found_out(launch: Launch, prompt: Prompt, mode: str, fault: Fault) -> None:
    """The negative control: bytes that are not the prompt's end the request with an error, never with an answer."""
    fleet = await launch(bandwidth=FAST, proxy={"retries": 0})
    fleet.faults.script += [fault]
    fleet.corrupt = 1
    with pytest.raises(errors.EngineDied, match="corrupt KV before its first step"):
        await fleet.ask(prompt(100), mode=mode)


async def test_scribbled_source_blocks_are_found_out(launch: Launch, prompt: Prompt) -> None:
    """The other negative control: blocks that change after the offer are seen at both ends."""
    fleet = await launch(bandwidth=FAST, proxy={"retries": 0})
    fleet.link.shut()
    asked = asyncio.create_task(fleet.ask(prompt(100), mode="read"))
    await fleet.link.reached()
    fleet.prefills[0].engine.memory().poison(range(512))
    fleet.link.open()
    fleet.corrupt = 2
    with pytest.raises(errors.EngineDied, match="corrupt KV"):
        await asked


def drop_ends(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, End]]:
    """kvd tells nobody how transfers end; gives the list of what it kept to itself."""
    attachments, dropped = fleet.kvd.node.attachments, list[tuple[str, End]]()
    tell = attachments.tell

    def keep(engine_id: str, message: End | Fenced, now: float) -> list[Any]:
        if isinstance(message, End):
            dropped.append((engine_id, message))
            return []
        return tell(engine_id, message, now)

    monkeypatch.setattr(attachments, "tell", keep)
    return dropped


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_a_lost_end_does_not_hang(
    launch: Launch, prompt: Prompt, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's own deadline ends the request with a typed error; the blocks wait for the end, since only kvd
    knows that nothing writes them, and are free as soon as it comes."""
    fleet = await launch(decodes=0, proxy={"retries": 0})
    decode = await fleet.host("decode", config=DecodeConfig(transfer_seconds=1.5))
    with monkeypatch.context() as patch:
        dropped = drop_ends(fleet, patch)
        with pytest.raises(errors.DeadlinePassed, match="hand-over did not end"):
            await fleet.ask(prompt(100), mode=mode)
        assert {end.outcome.value for _, end in dropped} == {"landed", "released"}
        assert not decode.engine.idle
    for engine_id, end in dropped:
        fleet.kvd.node.attachments.tell(engine_id, end, fleet.kvd.node.now())
    await fleet.settled()


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_ends_that_a_broken_stream_carried_are_said_again(
    launch: Launch, prompt: Prompt, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All Attach streams break just as the ends go out: the answer comes all the same."""
    fleet = await launch()
    attachments, cut = fleet.kvd.node.attachments, list[str]()
    tell = attachments.tell

    def cut_first(engine_id: str, message: End | Fenced, now: float) -> list[Any]:
        deaf = tell(engine_id, message, now)
        if isinstance(message, End) and engine_id not in cut:
            cut.append(engine_id)
            for member in attachments.of(engine_id):
                member.fail(errors.Unavailable("cut by the test"))
        return deaf

    monkeypatch.setattr(attachments, "tell", cut_first)
    tokens = prompt(100)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.recomputed_tokens, len(cut)) == (0, 2)
    await fleet.settled()
