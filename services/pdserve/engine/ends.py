"""What kvd's end of a transfer means to a service: an error, a line in the log, one sum of facts."""

from collections.abc import Sequence

from pdserve.kvd.client.messages import End, Facts
from pdserve.rpc.errors import PdserveError, TransferFailed, from_reason


def error_of(end: End) -> PdserveError:
    """The typed error behind an end that is not good."""
    message = end.detail or f"the transfer ended {end.outcome.value}"
    return from_reason(end.reason or TransferFailed.reason, message)


def words(end: End) -> dict[str, str | int]:
    """An end for the log."""
    said: dict[str, str | int] = {"outcome": end.outcome.value}
    if not end.outcome.good:
        return said | {"reason": end.reason, "detail": end.detail}
    facts = end.facts
    said |= {"kv_bytes": facts.kv_bytes, "blocks": facts.blocks, "transport": facts.transport}
    return said | {"lanes": facts.lanes} if facts.lanes else said


def sum_facts(parts: Sequence[Facts]) -> Facts | None:
    """The facts of all consumers as one; None where nothing landed.

    Bytes, blocks and copying add up; the span is from the first post to the last landing.
    """
    if not parts:
        return None
    return Facts(
        kv_bytes=sum(part.kv_bytes for part in parts),
        blocks=sum(part.blocks for part in parts),
        layers=max(part.layers for part in parts),
        ranks=max(part.ranks for part in parts),
        copy_ns=sum(part.copy_ns for part in parts),
        transport=next((part.transport for part in parts if part.transport), ""),
        lanes=next((part.lanes for part in parts if part.lanes), ""),
        # 0 is "not known": a consumer that had every block itself posts nothing.
        first_post_ns=min((part.first_post_ns for part in parts if part.first_post_ns), default=0),
        landed_ns=max(part.landed_ns for part in parts),
        overlapped_bytes=sum(part.overlapped_bytes for part in parts),
        offered_ns=max(part.offered_ns for part in parts),
        accepted_ns=max(part.accepted_ns for part in parts),
        last_byte_ns=max(part.last_byte_ns for part in parts),
    )
