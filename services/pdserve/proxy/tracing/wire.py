"""What the proxy and the process that draws its traces tell each other: one message each, as bytes. Pure.

    proxy ── Parcel: the record of a request ──▶ the process that draws
    proxy ◀── Report: what became of them so far ──

Both are written by the one program, so that neither has a version.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from pdserve.proxy.ended import Ended

LARGEST: Final = 64 << 10
"""Bytes of a message, at most. A record has some two thousand; an attempt more, or a long error, a few hundred more."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One request, for its trace to be drawn."""

    ended: Ended
    offset_ns: int
    """What makes the proxy's monotonic clock the epoch's."""


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers since the start of the process."""

    drawn: int = 0
    """Records that it is through with, those that could not be drawn included."""
    spans: int = 0
    """That were drawn."""
    exported: int = 0
    """Of them, as the next two: the collector has them. What is in none of the three is being sent."""
    dropped: int = 0
    failed: int = 0
    refused: str = ""
    """Why it does not even begin: a variable of OpenTelemetry's makes no sense."""
    undrawn: int = 0
    """Of `drawn`: those that could not be."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_PARCELS: Final = msgspec.msgpack.Decoder(Parcel)
_REPORTS: Final = msgspec.msgpack.Decoder(Report)


def pack(ended: Ended, offset_ns: int) -> bytes:
    """The record without what no trace shows: the strings and tokens that end an answer may be long, and are the
    client's own words. Text that UTF-8 has no bytes for is escaped, as in the trace.

    Raises:
        OverflowError: a number has more than 64 bits.
    """
    if ended.sampling.stop or ended.sampling.stop_token_ids:
        ended = replace(ended, sampling=replace(ended.sampling, stop=(), stop_token_ids=()))
    parcel = Parcel(ended, offset_ns)
    try:
        return _ENCODER.encode(parcel)
    except UnicodeEncodeError:  # half a surrogate pair
        return _ENCODER.encode(_escaped(msgspec.to_builtins(parcel, str_keys=False)))


def unpack(parcel: bytes) -> Parcel:
    """What `pack` was given.

    Raises:
        msgspec.MsgspecError: these bytes are none of its.
    """
    return _PARCELS.decode(parcel)


def pack_report(report: Report) -> bytes:
    """As it is sent."""
    return _ENCODER.encode(report)


def unpack_report(said: bytes) -> Report:
    """As it was sent.

    Raises:
        msgspec.MsgspecError: it was not.
    """
    return _REPORTS.decode(said)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_escaped(one) for one in value]
    return value
