"""Signed bytes: ours, of the right kind, in time, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.rpc.errors import TicketExpired, TicketForged
from pdserve.runtime.signing import Kind, Signer

SIGNER = Signer(b"key")


@given(st.binary(max_size=200), st.sampled_from(Kind))
def test_round_trip(payload: bytes, kind: Kind) -> None:
    """What was signed comes back."""
    assert SIGNER.verify(kind, SIGNER.sign(kind, payload), now=1e9) == payload


@given(st.binary(max_size=64), st.data())
def test_any_flipped_bit_is_forged(payload: bytes, data: st.DataObject) -> None:
    """No single bit of the value, its expiry or its kind can be changed."""
    signed = bytearray(SIGNER.sign(Kind.TICKET, payload, expires_at=2e9))
    position = data.draw(st.integers(0, len(signed) * 8 - 1))
    signed[position // 8] ^= 1 << position % 8
    with pytest.raises(TicketForged):
        SIGNER.verify(Kind.TICKET, bytes(signed), now=1e9)


@given(st.binary(max_size=100))
def test_noise_is_forged(noise: bytes) -> None:
    """Bytes of any length that we did not sign are refused, not a crash."""
    with pytest.raises(TicketForged):
        SIGNER.verify(Kind.LOCATOR, noise, now=0)


def test_other_kind_other_key() -> None:
    """A locator is no ticket; another cluster's ticket is none of ours."""
    with pytest.raises(TicketForged):
        SIGNER.verify(Kind.TICKET, SIGNER.sign(Kind.LOCATOR, b"x"), now=0)
    with pytest.raises(TicketForged):
        SIGNER.verify(Kind.TICKET, Signer(b"other").sign(Kind.TICKET, b"x"), now=0)


def test_expiry() -> None:
    """Valid until the expiry, over after it; 0 never ends."""
    signed = SIGNER.sign(Kind.TICKET, b"x", expires_at=100.0)
    assert SIGNER.verify(Kind.TICKET, signed, now=100.0) == b"x"
    with pytest.raises(TicketExpired):
        SIGNER.verify(Kind.TICKET, signed, now=100.1)
    assert SIGNER.verify(Kind.TICKET, SIGNER.sign(Kind.TICKET, b"x"), now=1e12) == b"x"
