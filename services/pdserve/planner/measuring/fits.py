"""The cost model and the hand-over's constants out of what was measured, with what they leave over. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.costmodel import CostModel
from pdserve.planner.measuring import lines
from pdserve.planner.measuring.lines import Line
from pdserve.planner.measuring.points import (
    DecodePoint,
    HandoverPoint,
    Measured,
    MixedPoint,
    Mode,
    PrefillPoint,
)
from pdserve.rpc.errors import ConfigError

MOST_RESIDUAL = 0.2
"""Nine of ten points have to be as near to the fit as this, relative."""
MOST_LEFT_OUT = 0.25
"""Share of the points that may be left out as stalls."""
LEAST_HANDOVERS = 4
"""READ hand-overs below which no bandwidth is fitted: a line of two costs goes through fewer whatever they are."""
LEAST_SPREAD = 1.5
"""The largest of them over the smallest, bytes, below which none is: their noise would be taken for it."""


@dataclass(frozen=True, slots=True)
class HandoverFit:
    """What moving a prompt's KV costs."""

    serialization: float
    """READ: from the end of prefill to decode's having blocks, seconds."""
    tail: dict[Mode, float]
    """From the last byte to decode's taking the request into a step, seconds; by mode. WRITE's holds the bytes that
    prefill did not hide, but the last layer's."""
    bandwidth: float | None
    """Bytes a second; None: the wait does not depend on the size, or there is no `line`."""
    bytes_per_token: float
    layers: int
    transport: str
    """What moved the bytes, by name."""
    line: Line | None
    """READ's wait over its bytes; None: too few points, or too much alike, to tell a bandwidth."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What becomes a profile."""

    cost: CostModel
    lines: dict[str, Line]
    """By what they are of: prefill, decode, mixed, read."""
    mixed_assumed: bool
    """Nothing was measured of steps that do both: they are taken to cost a decode step and the prompt's tokens."""
    handover: HandoverFit | None
    """None: there was no pair."""
    dispatch: float
    """From the proxy's receipt to the engine's step, seconds."""
    egress: float
    """From a token's step to the client, seconds."""


def fit(measured: Measured) -> Fitted:
    """Fits everything that was measured.

    Raises:
        ConfigError: the points cannot tell the costs apart.
    """
    prefill = _prefill(measured.prefill)
    decode = _decode(measured.decode)
    found = {"prefill": prefill, "decode": decode}
    base, per_token = prefill.costs
    decode_base, per_seq, per_context = decode.costs
    cost = CostModel(base, per_token, decode_base, per_seq, per_context, mixed_base=0.0, mixed_per_token=per_token)
    if measured.mixed:
        found["mixed"] = _mixed(measured.mixed, cost)
        base, per_token = found["mixed"].costs
        cost = replace(cost, mixed_base=base, mixed_per_token=per_token)
    handover = _handover(measured.handovers) if measured.handovers else None
    if handover is not None and handover.line is not None:
        found["read"] = handover.line
    return Fitted(
        cost=cost,
        lines=found,
        mixed_assumed=not measured.mixed,
        handover=handover,
        dispatch=statistics.median(point.dispatch for point in measured.edges),
        egress=statistics.median(point.egress for point in measured.edges),
    )


def misfits(fitted: Fitted, most: float = MOST_RESIDUAL) -> list[str]:
    """Why a fit is no good for planning, in words; empty where it is.

    The hand-over's line is not held to `most`: it is milliseconds beside a prompt's, and its times are short.
    """
    found = []
    for name, line in fitted.lines.items():
        if name == "read":
            continue
        if line.nine_in_ten > most:
            found.append(
                f"{name}: one point in ten is {line.nine_in_ten:.0%} or more beside the fit (at most {most:.0%})"
            )
        elif line.left_out > MOST_LEFT_OUT * len(line.counted):
            found.append(
                f"{name}: {line.left_out} of {len(line.counted)} points are far off (at most {MOST_LEFT_OUT:.0%})"
            )
    return found


def _prefill(points: Sequence[PrefillPoint]) -> Line:
    return lines.fit([(p.steps, p.tokens) for p in points], [p.seconds for p in points], "prefill")


def _decode(points: Sequence[DecodePoint]) -> Line:
    return lines.fit([(1, p.seqs, p.context_tokens) for p in points], [p.seconds for p in points], "decode")


def _mixed(points: Sequence[MixedPoint], cost: CostModel) -> Line:
    """Over what the decode line explains already; errors are relative to the whole step."""
    whole = [p.seconds for p in points]
    rest = [p.seconds - p.steps * cost.step_time(0, p.seqs, round(p.context_tokens)) for p in points]
    return lines.fit([(p.steps, p.tokens) for p in points], rest, "mixed steps", whole)


def _tell_bandwidth(read: Sequence[HandoverPoint]) -> bool:
    sizes = [p.kv_bytes for p in read]
    return len(sizes) >= LEAST_HANDOVERS and max(sizes) >= LEAST_SPREAD * min(sizes)


def _handover(points: Sequence[HandoverPoint]) -> HandoverFit:
    names = sorted({p.transport for p in points})
    if len(names) > 1:
        raise ConfigError(f"hand-overs went over {' and '.join(names)}: a profile is of one transport")
    read, write = ([p for p in points if p.mode == mode] for mode in ("read", "write"))
    tail: dict[Mode, float] = {}
    line = bandwidth = None
    if read:
        tail["read"] = statistics.median(p.wait for p in read)
    if _tell_bandwidth(read):
        line = lines.fit([(1, p.kv_bytes) for p in read], [p.wait for p in read], "READ hand-over")
        tail["read"] = line.costs[0]
        bandwidth = 1.0 / line.costs[1] if line.costs[1] > 0 else None
    if write:
        # The last layer's bytes, at least, cannot be pushed before prefill ends: they are the link's.
        last = [p.kv_bytes / p.layers / bandwidth if bandwidth else 0.0 for p in write]
        tail["write"] = max(0.0, statistics.median(p.wait - one for p, one in zip(write, last, strict=True)))
    return HandoverFit(
        serialization=statistics.median(p.serialization for p in read) if read else 0.0,
        tail=tail,
        bandwidth=bandwidth,
        bytes_per_token=statistics.median(p.kv_bytes / p.tokens for p in points),
        layers=points[0].layers,
        transport=names[0],
        line=line,
    )
