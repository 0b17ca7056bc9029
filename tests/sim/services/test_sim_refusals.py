"""What the services refuse of each other's words at their own API, past the proxy: forged, stale, used and foreign
tickets, ids used twice, engines that may not exchange KV. The other leg hears of it at once and nothing is held."""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdserve.kvd.types import Ticket
from pdserve.rpc import errors
from pdserve.runtime.signing import Kind, Signer
from tests.sim.fleet import Fleet, Prompt
from tests.sim.services.legs import Legs

TOKENS = 40


async def offered(fleet: Fleet, legs: Legs, tokens: tuple[int, ...]) -> tuple[bytes, bytes, Any]:
    """A READ that prefill has offered: its id, its ticket, and the open leg."""
    tid = os.urandom(16)
    leg = await legs.prefill(fleet.prefills[0], tid, tokens, "read")
    return tid, (await leg.read()).ready.ticket, leg


def ticket_of(fleet: Fleet, tid: bytes, tokens: int = TOKENS, *, expires_in: float = 60.0, key: bytes = b"") -> bytes:
    """A ticket of the first prefill engine, signed under the cluster's key or another."""
    service = fleet.prefills[0]
    locator = service.engine.info.locator(f"unix:{fleet.kvd.socket}")
    signer = Signer(key) if key else fleet.kvd.signer
    payload = msgspec.msgpack.encode(Ticket(locator, tid, tokens, -(-tokens // 16)))
    return signer.sign(Kind.TICKET, payload, service.parts.clock.unix() + expires_in)


def flip(signed: bytes, at: int) -> bytes:
    """One bit changed."""
    return signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]


Bad = Callable[[Fleet, bytes, bytes], bytes]

TICKETS: list[tuple[str, Bad, type[errors.PdserveError]]] = [
    ("a bit of the payload flipped", lambda fleet, tid, good: flip(good, 20), errors.TicketForged),
    ("a bit of the tag flipped", lambda fleet, tid, good: flip(good, -1), errors.TicketForged),
    ("longer by a byte", lambda fleet, tid, good: good + b"x", errors.TicketForged),
    ("cut off", lambda fleet, tid, good: good[:30], errors.TicketForged),
    ("not signed at all", lambda fleet, tid, good: b"x", errors.TicketForged),
    ("under another key", lambda fleet, tid, good: ticket_of(fleet, tid, key=b"another"), errors.TicketForged),
    (
        "a locator",
        lambda fleet, tid, good: fleet.card(fleet.prefills[0]).locator,
        errors.TicketForged,
    ),
    ("expired", lambda fleet, tid, good: ticket_of(fleet, tid, expires_in=-1.0), errors.TicketExpired),
    ("of another transfer", lambda fleet, tid, good: ticket_of(fleet, os.urandom(16)), errors.TicketRefused),
    ("of another prompt", lambda fleet, tid, good: ticket_of(fleet, tid, TOKENS + 1), errors.TicketRefused),
    (
        "no ticket in a signed frame",
        lambda fleet, tid, good: fleet.kvd.signer.sign(Kind.TICKET, b"\xc1"),
        errors.TicketRefused,
    ),
]


@pytest.mark.parametrize(("make", "kind"), [row[1:] for row in TICKETS], ids=[row[0] for row in TICKETS])
async def test_a_bad_ticket(
    fleet: Fleet, legs: Legs, prompt: Prompt, make: Bad, kind: type[errors.PdserveError]
) -> None:
    """Decode refuses it by name before its engine is asked, and prefill's offer is let go at once."""
    tokens = prompt(TOKENS)
    tid, good, held = await offered(fleet, legs, tokens)
    error = await fleet.refusal(await legs.decode(fleet.decodes[0], tid, tokens, ticket=make(fleet, tid, good)))
    assert type(error) is kind
    assert isinstance(await fleet.refusal(held), errors.ConsumerFailed)
    assert fleet.decodes[0].engine.load().steps == 0
    await fleet.settled(5)


LOCATORS: list[tuple[str, Bad, type[errors.PdserveError]]] = [
    ("forged", lambda fleet, tid, good: flip(good, 20), errors.TicketForged),
    ("a ticket", lambda fleet, tid, good: ticket_of(fleet, tid), errors.TicketForged),
    ("expired", lambda fleet, tid, good: fleet.prefills[0].parts.peers.our_locator(1.0), errors.TicketExpired),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("make", "kind"), [row[1:] for row in LOCATORS], ids=[row[0] for row in LOCATORS])
async def test_a_bad_locator(
    fleet: Fleet, legs: Legs, prompt: Prompt, make: Bad, kind: type[errors.PdserveError], side: str
) -> None:
    """In WRITE each leg checks the other's locator; the leg that was asked rightly hears that its peer failed."""
    tokens, tid = prompt(TOKENS), os.urandom(16)
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    if side == "decode":
        bad = make(fleet, tid, fleet.card(prefill).locator)
        refused = await legs.decode(decode, tid, tokens, locator=bad)
        peer, expected = await legs.prefill(prefill, tid, tokens, "write"), errors.ConsumerFailed
    else:
        bad = make(fleet, tid, fleet.card(decode).locator)
        refused = await legs.prefill(prefill, tid, tokens, "write", peer_locator=bad)
        peer, expected = await legs.decode(decode, tid, tokens), errors.ProducerFailed  # type: ignore[assignment]  # either
    assert type(await fleet.refusal(refused)) is kind
    assert isinstance(await fleet.refusal(peer), expected)
    await fleet.settled(5)


async def test_a_ticket_used_twice(fleet: Fleet, legs: Legs, prompt: Prompt) -> None:
    """By two services: kvd gives the blocks to the first, whose answer the second does not disturb."""
    other, tokens = await fleet.host("decode"), prompt(TOKENS)
    tid, ticket, held = await offered(fleet, legs, tokens)
    answer = await legs.tokens(await legs.decode(fleet.decodes[0], tid, tokens, ticket=ticket))
    assert answer == list(await fleet.alone(tokens, 4))
    for decode in (other, fleet.decodes[0]):
        error = await fleet.refusal(await legs.decode(decode, tid, tokens, ticket=ticket))
        assert type(error) is errors.TransferUsed
    assert (await held.read()).HasField("released")


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_a_transfer_id_used_twice_at_once(fleet: Fleet, legs: Legs, prompt: Prompt, mode: str) -> None:
    """The second user of an id is refused on either side while the first is served, and after it too."""
    tokens, tid = prompt(TOKENS), os.urandom(16)
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    prefill.steps.shut()
    held = await legs.prefill(prefill, tid, tokens, mode)
    await prefill.steps.reached()
    assert type(await fleet.refusal(await legs.prefill(prefill, tid, tokens, mode))) is errors.TransferUsed
    other = await fleet.host("prefill")
    ticket = ticket_of(fleet, tid) if mode == "read" else b""
    decode.steps.shut()
    answered = await legs.decode(decode, tid, tokens, ticket=ticket)
    await fleet.until(lambda: len(decode.parts.calls) == 1)
    assert type(await fleet.refusal(await legs.decode(decode, tid, tokens, ticket=ticket))) is errors.TransferUsed
    prefill.steps.open()
    decode.steps.open()
    answer = await legs.tokens(answered)
    assert answer == list(await fleet.alone(tokens, 4))
    released = await legs.released(held)
    assert released.transfer.blocks == 3
    for call in (await legs.prefill(other, tid, tokens, mode), await legs.prefill(prefill, tid, tokens, mode)):
        assert type(await fleet.refusal(call)) is errors.TransferUsed


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_the_words_of_an_ended_epoch(fleet: Fleet, legs: Legs, prompt: Prompt, mode: str) -> None:
    """A prefill engine is restarted: its old ticket and its old locator are refused at once, though well signed."""
    tokens, ended = prompt(TOKENS), fleet.prefills[0]
    tid, ticket, _ = await offered(fleet, legs, tokens)
    locator = fleet.card(ended).locator
    fresh_ticket = ticket_of(fleet, fresh := os.urandom(16))
    await fleet.kill(ended)
    await fleet.host("prefill")
    if mode == "read":
        lost = await fleet.refusal(await legs.decode(fleet.decodes[0], tid, tokens, ticket=ticket))
        assert type(lost) is errors.PeerLost
        call = await legs.decode(fleet.decodes[0], fresh, tokens, ticket=fresh_ticket)
    else:
        call = await legs.decode(fleet.decodes[0], os.urandom(16), tokens, locator=locator)
    assert type(await fleet.refusal(call)) is errors.StaleEpoch
    await fleet.settled(5)


DIFFERENCES = ["model", "weights", "dtype", "kv_dtype", "kv_heads", "attention_layout", "connector_protocol"]


@pytest.mark.parametrize("name", DIFFERENCES)
async def test_engines_that_may_not_exchange_kv(fleet: Fleet, legs: Legs, prompt: Prompt, name: str) -> None:
    """Each service refuses the other's words where one name of the identity differs, and says which and how either's
    KV lies; before prefill has computed anything."""
    shapes: dict[str, dict[str, Any]] = {
        "kv_heads": {"kv_heads": 4, "block_bytes": 512},
        "model": {"model": "other"},
    }
    shape = shapes.get(name, {})
    other = await fleet.host("decode", identity={} if shape else {name: "other"}, **shape)
    tokens, tid = prompt(TOKENS), os.urandom(16)
    refused = await legs.prefill(fleet.prefills[0], tid, tokens, "write", peer_locator=fleet.card(other).locator)
    error = await fleet.refusal(refused)
    assert type(error) is errors.IncompatibleEngines
    assert name in error.metadata
    assert fleet.prefills[0].engine.info.layout in error.message
    assert other.engine.info.layout in error.message
    assert fleet.prefills[0].engine.load().steps == 0
    tid, ticket, held = await offered(fleet, legs, tokens)
    error = await fleet.refusal(await legs.decode(other, tid, tokens, ticket=ticket))
    assert type(error) is errors.IncompatibleEngines
    assert name in error.metadata
    assert isinstance(await fleet.refusal(held), errors.ConsumerFailed)
    await fleet.settled(5)


PREFILL_ROWS: list[tuple[str, dict[str, Any], type[errors.PdserveError]]] = [
    ("a short transfer id", {"transfer_id": b"short"}, errors.InvalidRequest),
    ("no prompt", {"prompt_token_ids": []}, errors.EmptyPrompt),
    ("a token outside", {"prompt_token_ids": [258]}, errors.InvalidRequest),
    ("no consumer", {"consumers": 0}, errors.InvalidRequest),
    ("no mode", {"mode": 0}, errors.InvalidRequest),
    ("a mode of a newer version", {"mode": 9}, errors.InvalidRequest),
    ("longer than the context", {"prompt_token_ids": [7] * 4096}, errors.ContextExceeded),
]


@pytest.mark.parametrize(("fields", "kind"), [row[1:] for row in PREFILL_ROWS], ids=[row[0] for row in PREFILL_ROWS])
async def test_prefill_checks_for_itself(
    fleet: Fleet, legs: Legs, prompt: Prompt, fields: dict[str, Any], kind: type[errors.PdserveError]
) -> None:
    """Whatever the proxy let pass; a decode leg that waits for this producer hears of it."""
    tid, tokens = fields.get("transfer_id", os.urandom(16)), prompt(TOKENS)
    decode = await legs.decode(fleet.decodes[0], tid, tokens) if len(tid) == 16 else None
    more = {name: value for name, value in fields.items() if name not in ("transfer_id", "mode")}
    leg = await legs.prefill(fleet.prefills[0], tid, tokens, fields.get("mode", "write"), **more)
    error = await fleet.refusal(leg)
    assert type(error) is kind
    assert fleet.prefills[0].engine.load().steps == 0
    if decode is not None:
        assert type(await fleet.refusal(decode)) is errors.ProducerFailed
    await fleet.settled(5)
