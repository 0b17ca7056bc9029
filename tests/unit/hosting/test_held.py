"""A service's hold on a transfer: which ways out give it up at kvd."""

import pytest

from pdserve.engine.hosting.held import Held
from pdserve.engine.hosting.testing import ScriptedHandoffs
from pdserve.kvd.client.messages import Outcome
from pdserve.rpc.errors import (
    KvdUnavailable,
    PeerLost,
    ProducerFailed,
    RequestCancelled,
    TransferExpired,
)

TID = bytes(range(16))


@pytest.mark.parametrize(
    ("outcome", "reason", "given_up"),
    [
        (Outcome.RELEASED, "", False),
        (Outcome.EXPIRED, TransferExpired.reason, False),
        (Outcome.FAILED, PeerLost.reason, False),
        (Outcome.FAILED, KvdUnavailable.reason, True),
    ],
)
async def test_an_end_from_kvd_is_one_and_that_kvd_was_lost_is_none(
    outcome: Outcome, reason: str, given_up: bool
) -> None:
    """Its engine may have been attached to the restarted daemon before its service was, and have offered there: blocks
    would wait for a lease to run out."""
    handoffs = ScriptedHandoffs()
    with Held(handoffs, TID, ProducerFailed) as held:
        watch = held.watch(None)
        handoffs.end(TID, None, outcome, reason)
        assert watch.result is not None
    assert handoffs.cancelled == ([(TID, RequestCancelled.reason)] if given_up else [])
    assert handoffs.watches[(TID, None)].closed


async def test_one_end_of_two_is_not_enough() -> None:
    """A transfer with a watched end to come is given up, with the reason of what went wrong here."""
    handoffs = ScriptedHandoffs()
    held = Held(handoffs, TID, ProducerFailed)
    for consumer in range(2):
        held.watch(consumer)
    handoffs.end(TID, 0, Outcome.LANDED)
    with pytest.raises(ZeroDivisionError), held:
        raise ZeroDivisionError
    assert handoffs.cancelled == [(TID, ProducerFailed.reason)]


async def test_before_anything_is_watched_the_other_side_is_told() -> None:
    """A request that was refused at the door."""
    handoffs = ScriptedHandoffs()
    with pytest.raises(ZeroDivisionError), Held(handoffs, TID, ProducerFailed):
        raise ZeroDivisionError
    assert handoffs.cancelled == [(TID, ProducerFailed.reason)]
