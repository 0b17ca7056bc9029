"""What a decode service shows of the prompts that it computes because their hand-overs failed."""

from collections.abc import Iterator

from pdserve.decode.session import Decoder
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry.tally import Reading


def readings(decoder: Decoder, role: str) -> Iterator[Reading]:
    """What is true now."""
    yield c.ENGINE_RECOMPUTING, (role,), decoder.slots.running
    yield c.ENGINE_RECOMPUTES, (role,), decoder.recomputes
    yield c.ENGINE_RECOMPUTES_REFUSED, (role,), decoder.slots.refused
