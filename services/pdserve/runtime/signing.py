"""Bytes that only a member of the cluster can have made: locators, tickets, registrations.

Form: kind (1 byte) | expiry (8 bytes, unix milliseconds, big-endian, 0 = never) | payload |
HMAC-SHA256 of all before it under the cluster key (32 bytes).
"""

import hashlib
import hmac
import struct
from enum import IntEnum

from pdserve.rpc.errors import TicketExpired, TicketForged

_HEAD = struct.Struct(">BQ")
_MAC_BYTES = 32


class Kind(IntEnum):
    """What a signed value is; one kind never passes for another."""

    LOCATOR = 1
    TICKET = 2
    BEAT = 3
    HELLO = 4


class Signer:
    """Signs and checks under one cluster key."""

    def __init__(self, cluster_key: bytes) -> None:
        self._key = cluster_key

    def sign(self, kind: Kind, payload: bytes, expires_at: float = 0.0) -> bytes:
        """Signs `payload` until `expires_at` (unix seconds; 0: for ever)."""
        body = _HEAD.pack(kind, int(expires_at * 1000)) + payload
        return body + self._mac(body)

    def verify(self, kind: Kind, signed: bytes, now: float) -> bytes:
        """The payload of a value that is ours, of this kind and not over at `now` (unix seconds).

        Raises:
            TicketForged: too short, of another kind, or not signed under this key.
            TicketExpired: signed by us and over.
        """
        body, mac = signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]
        if len(body) < _HEAD.size or not hmac.compare_digest(mac, self._mac(body)):
            raise TicketForged(f"{kind.name.lower()} is not signed under this cluster's key")
        found, expires_ms = _HEAD.unpack_from(body)
        if found != kind:
            raise TicketForged(f"expected a {kind.name.lower()}, got a signed value of another kind")
        if expires_ms and now * 1000 > expires_ms:
            raise TicketExpired(f"{kind.name.lower()} expired {now - expires_ms / 1000:.1f} s ago")
        return body[_HEAD.size :]

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)
