"""Tickets and locators, and the daemon's side of the Attach messages."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvd import codec
from pdserve.kvd.client import codec as client_codec
from pdserve.kvd.client.messages import (
    Accept,
    Begin,
    Cancel,
    End,
    Facts,
    Fenced,
    Hello,
    Offer,
    Outcome,
    Participant,
    Renew,
    Request,
    Retract,
    Welcome,
)
from pdserve.kvd.credentials import source_of
from pdserve.kvd.types import Locator, Mode, Ticket
from pdserve.rpc.errors import InvalidRequest, TicketExpired, TicketForged, TicketRefused
from pdserve.runtime.signing import Kind, Signer

SIGNER = Signer(b"a cluster's key, long enough")
HERE = Locator("P", "unix:/x", {"model": "m"})
TID = bytes(range(16))


def sign(kind: Kind, payload: object, expires_at: float = 0.0) -> bytes:
    """Signed under the cluster's key."""
    return SIGNER.sign(kind, msgspec.msgpack.encode(payload), expires_at)


def accept(*, ticket: bytes = b"", locator: bytes = b"") -> Accept:
    """Of transfer TID."""
    return Accept("c", TID, 0, (1,), 0, ticket=ticket, peer_locator=locator)


def test_a_ticket_names_a_read_and_a_locator_a_write() -> None:
    """Who produces, what it is, and the mode come from the signed bytes."""
    by_ticket = source_of(SIGNER, accept(ticket=sign(Kind.TICKET, Ticket(HERE, TID, 5, 1))), 0)
    assert (by_ticket.engine_id, by_ticket.mode, by_ticket.identity) == ("P", Mode.READ, {"model": "m"})
    by_locator = source_of(SIGNER, accept(locator=sign(Kind.LOCATOR, HERE)), 0)
    assert (by_locator.engine_id, by_locator.mode) == ("P", Mode.WRITE)


GOOD = sign(Kind.TICKET, Ticket(HERE, TID, 5, 1))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (accept(), InvalidRequest),
        (accept(ticket=GOOD[:-1] + bytes([GOOD[-1] ^ 1])), TicketForged),
        (accept(ticket=GOOD[:5] + b"\x01" + GOOD[6:]), TicketForged),
        (accept(ticket=b"x"), TicketForged),
        (accept(ticket=sign(Kind.LOCATOR, HERE)), TicketForged),
        (accept(locator=GOOD), TicketForged),
        (accept(ticket=sign(Kind.TICKET, Ticket(HERE, TID, 5, 1), 99.0)), TicketExpired),
        (accept(ticket=sign(Kind.TICKET, Ticket(HERE, bytes(16), 5, 1))), TicketRefused),
        (accept(ticket=sign(Kind.TICKET, {"some": "thing"})), TicketRefused),
        (accept(locator=sign(Kind.LOCATOR, [1, 2])), TicketRefused),
    ],
)
def test_what_is_not_signed_for_this_transfer_is_refused(message: Accept, error: type[Exception]) -> None:
    """Forged, changed, of another kind, over, of another transfer, or signed and unreadable: each by its class."""
    with pytest.raises(error) as caught:
        source_of(SIGNER, message, 100.0)
    assert type(caught.value) is error


text = st.text(max_size=20)
ids = st.binary(max_size=16)
u32 = st.integers(0, 2**32 - 1)
blocks = st.lists(u32, max_size=4).map(tuple)
modes = st.sampled_from(Mode)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(Begin, text, ids, modes, u32),
    st.builds(Offer, text, ids, u32, blocks, u32, modes, u32, st.integers(0, 2**62)),
    st.builds(Accept, text, ids, u32, blocks, u32, st.binary(min_size=1), st.just(b""), st.integers(0, 2**62)),
    st.builds(Accept, text, ids, u32, blocks, u32, st.just(b""), st.binary(), st.integers(0, 2**62)),
    st.builds(Retract, text, u32, st.booleans(), text),
    st.builds(Cancel, ids, text),
    st.builds(Renew, st.lists(ids, max_size=3).map(tuple)),
)


@given(requests)
def test_requests_arrive_as_they_were_sent(request_: Request) -> None:
    """The client's encoding and the daemon's decoding agree on every field."""
    assert codec.decode(client_codec.encode(request_)) == request_


facts = st.builds(
    Facts, u32, u32, u32, u32, u32, st.sampled_from(["shm", "sim"]), u32, u32, u32, st.integers(0, 2**62), u32
)


@given(st.builds(End, text, ids, st.sampled_from([o for o in Outcome if o.good]), facts=facts, producer=st.booleans()))
def test_good_ends_arrive_with_their_facts(end: End) -> None:
    """The daemon's encoding and the client's decoding agree."""
    assert client_codec.decode(codec.encode(end)) == end


@given(st.builds(End, text, ids, st.sampled_from([o for o in Outcome if not o.good]), text, text, consumer=u32))
def test_bad_ends_arrive_with_their_reason(end: End) -> None:
    """Reason, detail and consumer survive; there are no facts."""
    assert client_codec.decode(codec.encode(end)) == end


def test_hello_welcome_and_fenced_arrive() -> None:
    """The first messages each way, and the answer to a preemption."""
    hello = Hello("e", Participant.WORKER, {"model": "m"}, 4, 3)
    assert codec.decode_hello(client_codec.encode_hello(hello))[0] == hello
    welcome = Welcome("epoch", "ipc:///x", "/y", 0.3, 0.1, 5.0)
    assert client_codec.decode(codec.encode_welcome(welcome)) == welcome
    assert client_codec.decode(codec.encode(Fenced("h", 3))) == Fenced("h", 3)
