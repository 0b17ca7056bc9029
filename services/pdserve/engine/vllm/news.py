"""What an engine's scheduler tells its service of each consumer, inside vLLM's own statistics.

They leave EngineCore with every step, behind the outputs of the steps before: no other channel,
and nothing to wait for.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from pdserve.kvd.client.messages import End

KEY: Final = "pdserve"


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """A consumer has its blocks."""

    transfer_id: bytes
    consumer: int
    local_tokens: int
    """Prompt tokens found in the engine's own prefix cache."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A consumer's hand-over failed."""

    transfer_id: bytes
    consumer: int
    reason: str
    """A reason of pdserve.rpc.errors."""
    detail: str


News = Taken | Failed

_decoder: msgspec.msgpack.Decoder[list[News]] = msgspec.msgpack.Decoder(list[News])


def failure(end: End) -> Failed:
    """The news of an end that is not good."""
    return Failed(end.transfer_id, end.consumer, end.reason, end.detail or f"the hand-over ended {end.outcome.value}")


def encode(news: Iterable[News]) -> dict[str, Any]:
    """As the payload of vLLM's connector statistics."""
    return {KEY: msgspec.msgpack.encode(list(news))}


def decode(payload: Mapping[str, Any] | None) -> list[News]:
    """The news in a payload; none where there is no payload.

    Raises:
        ValueError: not what `encode` made.
    """
    return _decoder.decode(payload[KEY]) if payload else []
