"""A failed hand-over whose prompt decode computes itself: where that is allowed, and how many at once."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from pdserve.decode.session import DecodeConfig
from pdserve.engine.port import Consume, Output
from pdserve.kvd.client.messages import Outcome
from pdserve.rpc import errors
from tests.unit.decode.world import RECOMPUTE, World, source, taken, ticket
from tests.unit.served import TID, refused


@pytest.mark.parametrize(
    ("world", "asked"),
    [(DecodeConfig(), {"on_failure": RECOMPUTE}), (DecodeConfig(recompute=True), {})],
    indirect=["world"],
    ids=["request", "config"],
)
async def test_a_failed_hand_over_is_recomputed_where_allowed(world: World, asked: dict[str, Any]) -> None:
    """The answer is the same, and says how many tokens were computed here."""
    with capture_logs() as logs:
        call = world.ask(**asked)
        run = await world.engine.next_run()
        assert isinstance(run.request.kv, Consume)
        assert run.request.kv.recompute
        world.handoffs.end(TID, 0, Outcome.FAILED, "PEER_LOST")
        run.answer([65], recomputed_tokens=3)
        tokens, finished = [message async for message in call]
    assert {"KV_LANDED", "DECODE_BLOCKS_RESERVED"}.isdisjoint(taken(tokens.tokens.stamps))
    assert finished.finished.recomputed_tokens == 3
    assert not finished.finished.HasField("transfer")
    assert "decode_ended" in [line["event"] for line in logs]


@pytest.mark.parametrize("reason", ["TRANSFER_USED", "TICKET_FORGED", "INCOMPATIBLE_ENGINES"])
async def test_a_wrong_request_is_not_recomputed(world: World, reason: str) -> None:
    """Computing its prompt would hide what is wrong with it."""
    call = world.ask(on_failure=RECOMPUTE)
    run = await world.engine.next_run()
    world.handoffs.end(TID, 0, Outcome.FAILED, reason)
    assert (await refused(call)).reason == reason
    assert run.aborted.is_set()


@pytest.mark.parametrize("world", [DecodeConfig(recomputing=1)], indirect=True)
async def test_recomputing_is_capped(world: World) -> None:
    """Past the cap a request fails; a slot is free again with the first token of the one that had it."""
    ids = [bytes([number]) * 16 for number in range(1, 4)]

    async def fails(transfer_id: bytes) -> tuple[Any, Any]:
        call = world.ask(
            on_failure=RECOMPUTE, source=source(transfer_id=transfer_id, ticket=ticket(transfer_id=transfer_id))
        )
        run = await world.engine.next_run()
        world.handoffs.end(transfer_id, 0, Outcome.FAILED, "PEER_LOST")
        return call, run

    first, first_run = await fails(ids[0])
    second, _ = await fails(ids[1])
    assert isinstance(await refused(second), errors.PeerLost)
    first_run.say(Output((65,), "A"))
    assert (await first.read()).tokens.text == "A"
    third, third_run = await fails(ids[2])
    third_run.answer([65], recomputed_tokens=3)
    assert len([message async for message in third]) == 2
    first_run.answer([66])
    assert (await first.read()).tokens.text == "B"
    assert (await first.read()).HasField("finished")
