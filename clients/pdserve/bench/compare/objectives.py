"""The SLOs of a comparison: multiples of what one colocated engine does beside a busy neighbour. Pure.

TTFT objective = 5 x the median time to first token, ITL objective = 1.7 x the median gap between tokens, of one of
two colocated engines that serves one request at a time while the other decodes a full batch. The proportions are those
of the published objectives (1 s and 50 ms) to what the published engines do unloaded. The neighbour is there
because both engines share the machine's memory bandwidth: an objective from an idle machine is one that nobody holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pdserve.bench.slo import Slo
from pdserve.rpc.errors import ConfigError

TTFT_FACTOR = 5.0
ITL_FACTOR = 1.7


@dataclass(frozen=True, slots=True)
class Sample:
    """One calibration request, as the client saw it; seconds."""

    ttft: float
    itls: tuple[float, ...]
    """Gaps between its tokens."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured before any load, and is never changed after."""

    samples: tuple[Sample, ...]
    """One at a time, in order; the first request is not among them."""
    neighbours: int
    """Answers that the other engine decoded meanwhile."""

    @property
    def ttft(self) -> float:
        """Median time to first token, seconds."""
        return median(sample.ttft for sample in self.samples)

    @property
    def itl(self) -> float:
        """Median gap, over all gaps of all requests, seconds."""
        return median(gap for sample in self.samples for gap in sample.itls)


def calibrated(samples: Sequence[Sample], neighbours: int) -> Calibration:
    """Checks that medians can be taken.

    Raises:
        ConfigError: no request, or none with a gap between two tokens.
    """
    if not any(sample.itls for sample in samples):
        raise ConfigError("no calibration request had two tokens: no SLO can be made")
    return Calibration(tuple(samples), neighbours)


def slo_of(calibration: Calibration) -> Slo:
    """The objectives; ITL is held against each request's 99th percentile."""
    return Slo(ttft=TTFT_FACTOR * calibration.ttft, itl=ITL_FACTOR * calibration.itl, itl_of="p99")


def held(calibration: Calibration) -> int:
    """How many of the calibration requests met the objectives that were made of them.

    Where few did, the machine stutters even without a load, and no configuration will hold the objectives.
    """
    slo = slo_of(calibration)
    return sum(not slo.missed(ttft=sample.ttft, itls=sample.itls) for sample in calibration.samples)


def caution(calibration: Calibration, threshold: float) -> str:
    """What follows where too few of the calibration requests met the objectives; empty: enough did."""
    count, met = len(calibration.samples), held(calibration)
    if met >= threshold * count:
        return ""
    return (
        f"only {met} of {count} calibration requests met the objectives that were made of them: this machine stutters "
        f"without a load, and {threshold:.0%} may be out of reach of every configuration"
    )


def words(calibration: Calibration) -> str:
    """Where the objectives come from, and whether this machine can hold them at all."""
    slo, count = slo_of(calibration), len(calibration.samples)
    return (
        f"SLO: TTFT {slo.ttft:.3f} s = {TTFT_FACTOR:g} x {calibration.ttft:.3f} s, "
        f"ITL (each request's P99) {slo.itl:.4f} s = {ITL_FACTOR:g} x {calibration.itl:.4f} s; "
        f"medians of {count} requests, one at a time, on one engine of the colocated pair "
        f"while the other decoded {calibration.neighbours} answers at once; "
        f"{held(calibration)} of the {count} met both"
    )
