"""What no decode request may be: refused by name before the engine is asked, and prefill's blocks are free at once."""

from typing import Any

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.kvd.client.messages import Outcome
from pdserve.rpc import errors
from pdserve.runtime.signing import Kind, Signer
from tests.unit.decode.world import WRITE, World, producer, source, ticket
from tests.unit.served import OTHER, SIGNER, TID, refused

LONG = list(range(100)) * 3
LOCATOR = producer().our_locator(0.0)
BAD: dict[str, tuple[dict[str, Any], type[errors.PdserveError]]] = {
    "empty prompt": ({"prompt_token_ids": []}, errors.EmptyPrompt),
    "beyond the context": ({"prompt_token_ids": LONG}, errors.ContextExceeded),
    "answer beyond the context": ({"sampling": common_pb2.SamplingParams(max_tokens=254)}, errors.ContextExceeded),
    "not in the vocabulary": ({"prompt_token_ids": [258]}, errors.InvalidRequest),
    "no tokens": ({"sampling": common_pb2.SamplingParams(max_tokens=0)}, errors.InvalidRequest),
    "no answers": ({"sampling": common_pb2.SamplingParams(n=0)}, errors.InvalidRequest),
    "too many answers": ({"sampling": common_pb2.SamplingParams(n=129)}, errors.InvalidRequest),
    "NaN": ({"sampling": common_pb2.SamplingParams(top_p=float("inf"))}, errors.InvalidRequest),
    "odd request id": ({"request_id": "x" * 257}, errors.InvalidRequest),
    "no mode": ({"source": source(mode=0)}, errors.InvalidRequest),
    "no ticket": ({"source": source(ticket=None)}, errors.InvalidRequest),
    "empty ticket": ({"source": source(ticket=b"")}, errors.InvalidRequest),
    "READ with a locator": ({"source": source(peer_locator=LOCATOR)}, errors.InvalidRequest),
    "WRITE with a ticket": ({"source": source(mode=WRITE)}, errors.InvalidRequest),
    "odd policy": ({"on_failure": 9}, errors.InvalidRequest),
    "forged ticket": ({"source": source(ticket=ticket(Signer(b"another key")))}, errors.TicketForged),
    "noise for a ticket": ({"source": source(ticket=b"noise")}, errors.TicketForged),
    "stale ticket": ({"source": source(ticket=ticket(expires_at=1000.0))}, errors.TicketExpired),
    "another's ticket": ({"source": source(ticket=ticket(transfer_id=OTHER))}, errors.TicketRefused),
    "ticket of another prompt": ({"source": source(ticket=ticket(tokens=4))}, errors.TicketRefused),
    "ticket of another version": ({"source": source(ticket=SIGNER.sign(Kind.TICKET, b"\x80"))}, errors.TicketRefused),
    "ticket of another model": ({"source": source(ticket=ticket(model="m2"))}, errors.IncompatibleEngines),
    "locator for a ticket": ({"source": source(ticket=LOCATOR)}, errors.TicketForged),
    "forged locator": (
        {"source": source(mode=WRITE, peer_locator=producer(Signer(b"another key")).our_locator(0.0))},
        errors.TicketForged,
    ),
    "stale locator": (
        {"source": source(mode=WRITE, peer_locator=producer().our_locator(1000.0))},
        errors.TicketExpired,
    ),
    "locator of another model": (
        {"source": source(mode=WRITE, peer_locator=producer(model="m2").our_locator(0.0))},
        errors.IncompatibleEngines,
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_by_name_before_the_engine(world: World, name: str) -> None:
    """And prefill's blocks are released at once: no one waits for a lease to run out."""
    changes, kind = BAD[name]
    assert type(await refused(world.ask(**changes))) is kind
    assert world.engine.runs == []
    await world.idle()
    assert world.handoffs.cancelled == [(TID, "CONSUMER_FAILED")]


@pytest.mark.parametrize("transfer_id", [b"", b"short", bytes(17)])
async def test_what_is_no_transfer_id_is_refused(world: World, transfer_id: bytes) -> None:
    """There is nothing to release then."""
    assert type(await refused(world.ask(source=source(transfer_id=transfer_id)))) is errors.InvalidRequest
    assert world.handoffs.cancelled == []


async def test_a_transfer_is_taken_once(world: World) -> None:
    """At the same time or later; the request that has it goes on untouched."""
    first = world.ask()
    run = await world.engine.next_run()
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    world.handoffs.end(TID, 0, Outcome.LANDED)
    run.answer([65])
    assert len([message async for message in first]) == 2
    await world.idle()
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    assert world.handoffs.cancelled == []
