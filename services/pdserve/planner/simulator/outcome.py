"""What came out: each request's latencies, what each engine did, and totals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pdserve.bench.slo import ItlOf, Slo
from pdserve.planner.simulator.runs import Spent
from pdserve.planner.simulator.world import World

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered in full; seconds."""

    index: int
    """Its place in the jobs."""
    sent: float
    """When the client sent it."""
    ttft: float
    """To the first token."""
    e2e: float
    """To the last token."""
    itl_mean: float
    """Mean gap between tokens; 0 where there is one token. This is TPOT too."""
    itl_p99: float
    """99th percentile of the gaps, as numpy.percentile; 0 where there is one token."""
    itl_max: float
    """Longest gap; 0 where there is one token."""
    tokens: int
    """Of the answer."""
    prefilled: float
    """From sending to the end of the prompt's computation."""
    handed_over: float
    """From there to decode knowing of its KV; 0 where nothing was handed over."""
    attempts: int
    """1, and one more for each failure."""

    def itl(self, of: ItlOf) -> float | None:
        """The figure of the gaps that an SLO asks for; None where there is one token."""
        if self.tokens == 1:
            return None
        return {"p99": self.itl_p99, "mean": self.itl_mean, "max": self.itl_max}[of]

    def missed(self, slo: Slo) -> tuple[str, ...]:
        """Names of the objectives that it missed."""
        tpot = self.itl_mean if self.tokens > 1 else None
        return slo.missed_figures(ttft=self.ttft, itl=self.itl(slo.itl_of), tpot=tpot, e2e=self.e2e)


class Outcome:
    """A simulation's results."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = [np.array(engine.ends) for engine in world.engines]
        self.engines: tuple[Spent, ...] = tuple(engine.spent for engine in world.engines)
        """What each did."""
        self.unfinished: tuple[int, ...] = tuple(r.index for r in world.requests if r.done is None)
        """Requests that could not be served to the end."""
        self.events: int = world.events
        """That the simulation took."""
        self.moved: float = world.links.moved
        """Bytes handed over, beyond what WRITE pushed during prefill."""

    @cached_property
    def served(self) -> tuple[Served, ...]:
        """All that were answered in full, in the order of the jobs."""
        return tuple(self._serve(r.index) for r in self._world.requests if r.done is not None)

    def times(self, index: int) -> Floats:
        """When the client got each token of a request, seconds from the start."""
        parts: list[Floats] = []
        for piece in self._world.requests[index].pieces:
            if isinstance(piece, float):
                parts.append(np.array([piece]))
            else:
                engine, begin, end = piece
                parts.append(self._steps[engine][begin:end])
        return np.concatenate(parts) + self._world.fleet.egress if parts else np.empty(0)

    def itls(self, index: int) -> Floats:
        """A request's gaps between tokens, seconds, in order."""
        return np.diff(self.times(index))

    def _serve(self, index: int) -> Served:
        request = self._world.requests[index]
        times = self.times(index)
        gaps = np.diff(times)
        mean = p99 = longest = 0.0
        if len(gaps):
            mean, p99, longest = float(gaps.mean()), p99_of(gaps), float(gaps.max())
        prefilled = request.prefilled if request.prefilled is not None else request.sent
        return Served(
            index=index,
            sent=request.sent,
            ttft=float(times[0]) - request.sent,
            e2e=float(times[-1]) - request.sent,
            itl_mean=mean,
            itl_p99=p99,
            itl_max=longest,
            tokens=len(times),
            prefilled=prefilled - request.sent,
            handed_over=0.0 if request.landed is None else request.landed - prefilled,
            attempts=request.attempt + 1,
        )

    # -- totals -----------------------------------------------------------------------------

    @cached_property
    def duration(self) -> float:
        """From the first sending to the last token of those served, seconds; 0 where none was."""
        if not self.served:
            return 0.0
        return max(s.sent + s.e2e for s in self.served) - min(r.sent for r in self._world.requests)

    def attainment(self, slo: Slo) -> float:
        """Share of all requests that meet every objective."""
        return sum(not s.missed(slo) for s in self.served) / len(self._world.requests)

    def missed(self, slo: Slo) -> dict[str, float]:
        """Share of all requests that missed each objective; `unfinished` for those not served."""
        total = len(self._world.requests)
        counts: dict[str, int] = {"unfinished": len(self.unfinished)} if self.unfinished else {}
        for one in self.served:
            for name in one.missed(slo):
                counts[name] = counts.get(name, 0) + 1
        return {name: number / total for name, number in counts.items()}

    def good_rate(self, slo: Slo) -> float:
        """Requests per second, over the whole run, that meet every objective."""
        good = sum(not s.missed(slo) for s in self.served)
        return good / self.duration if self.duration else 0.0

    @property
    def output_throughput(self) -> float:
        """Answer tokens per second over the whole run."""
        return sum(s.tokens for s in self.served) / self.duration if self.duration else 0.0

    @property
    def total_throughput(self) -> float:
        """Prompt and answer tokens per second over the whole run."""
        tokens = sum(s.tokens + self._world.requests[s.index].job.prompt for s in self.served)
        return tokens / self.duration if self.duration else 0.0

    def ttfts(self) -> Floats:
        """Of those served, seconds."""
        return np.array([s.ttft for s in self.served])

    def __iter__(self) -> Iterator[Served]:
        return iter(self.served)


def p99_of(gaps: Floats | Sequence[float]) -> float:
    """numpy.percentile(gaps, 99), many times faster. At least one gap."""
    values = np.asarray(gaps)
    place = (len(values) - 1) * 0.99
    below = int(place)
    above = min(below + 1, len(values) - 1)
    parted = np.partition(values, (below, above))
    low, high, part = float(parted[below]), float(parted[above]), place - below
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
