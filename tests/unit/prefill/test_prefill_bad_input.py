"""What no prefill request may be: refused by name before the engine is asked, and the decode leg is told at once."""

from dataclasses import replace
from typing import Any

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.stamps import Progress
from pdserve.engine.hosting.testing import INFO, ScriptedEngine, ScriptedHandoffs
from pdserve.engine.port import Sampling
from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.types import Mode
from pdserve.prefill.session import Ask, PrefillConfig, Prefiller
from pdserve.rpc import errors
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.signing import Kind, Signer
from tests.unit.prefill.world import World, locator, ready
from tests.unit.served import SIGNER, TID, refused

LONG = list(range(100)) * 3
BAD: dict[str, tuple[dict[str, Any], type[errors.PdserveError], bool]] = {
    "empty prompt": ({"prompt_token_ids": []}, errors.EmptyPrompt, True),
    "beyond the context": ({"prompt_token_ids": LONG}, errors.ContextExceeded, True),
    "not in the vocabulary": ({"prompt_token_ids": [258]}, errors.InvalidRequest, True),
    "no mode": ({"mode": 0}, errors.InvalidRequest, True),
    "no consumer": ({"consumers": 0}, errors.InvalidRequest, True),
    "odd request id": ({"request_id": "a\nb"}, errors.InvalidRequest, True),
    "NaN": ({"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, errors.InvalidRequest, True),
    "WRITE without a peer": ({"mode": common_pb2.TRANSFER_MODE_WRITE}, errors.InvalidRequest, True),
    "forged peer": ({"peer_locator": locator(Signer(b"another key"))}, errors.TicketForged, True),
    "expired peer": ({"peer_locator": locator(expires_at=1000.0)}, errors.TicketExpired, True),
    "ticket as locator": ({"peer_locator": SIGNER.sign(Kind.TICKET, b"x")}, errors.TicketForged, True),
    "odd locator": ({"peer_locator": SIGNER.sign(Kind.LOCATOR, b"x")}, errors.TicketRefused, True),
    "other model": ({"peer_locator": locator(model="m2")}, errors.IncompatibleEngines, True),
    "short transfer id": ({"transfer_id": b"short"}, errors.InvalidRequest, False),
    "no transfer id": ({"transfer_id": b""}, errors.InvalidRequest, False),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_by_name_before_the_engine(world: World, name: str) -> None:
    """And a decode leg that may wait for this transfer is told at once."""
    changes, kind, told = BAD[name]
    error = await refused(world.ask(**changes))
    assert type(error) is kind
    assert world.engine.runs == []
    await world.idle()
    assert world.handoffs.cancelled == ([(TID, "PRODUCER_FAILED")] if told else [])


async def test_incompatible_engines_are_told_what_differs(world: World) -> None:
    """The metadata names it."""
    error = await refused(world.ask(peer_locator=locator(model="m2", dtype="bf16")))
    assert error.metadata == {"model": "scripted != m2", "dtype": "None != bf16"}


async def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    """Where the context would allow it."""
    small = replace(INFO, num_blocks=2)
    prefiller = Prefiller(
        ScriptedEngine(small), ScriptedHandoffs(), Peers(small, "", SIGNER), Calls(), Clock(), PrefillConfig()
    )
    ask = Ask("r", TID, Mode.READ, tuple(range(33)), Sampling(), b"", 1)
    with pytest.raises(errors.PoolExceeded):
        await anext(prefiller.run(TID, lambda: ask, Progress()))


async def test_a_transfer_id_is_good_once(world: World) -> None:
    """At the same time or later; the request that has it goes on untouched."""
    first = world.ask()
    await ready(world, first)
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    assert world.handoffs.cancelled == []
    world.handoffs.end(TID, None, Outcome.RELEASED)
    assert (await first.read()).WhichOneof("event") == "released"
    await world.idle()
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    assert world.handoffs.cancelled == []
