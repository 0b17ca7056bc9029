"""The two searches: constants by differential evolution, and a rate by bisection."""

import math

import numpy as np
import pytest

from pdserve.bench.slo import Slo
from pdserve.planner.fitting import DIGITS, minimise
from pdserve.planner.profile_file import load
from pdserve.planner.ratio import goodput, splits
from pdserve.planner.search import highest
from pdserve.planner.simulator import Job, Mode, p99_of
from pdserve.rpc.errors import ConfigError

BOUNDS = ((-5.0, 5.0), (-5.0, 5.0), (0.0, 1.0))


def valley(values: tuple[float, ...]) -> float:
    """Rugged, with its lowest point at (1.5, -2, 0.25)."""
    wanted = (1.5, -2.0, 0.25)
    away = [abs(a - b) for a, b in zip(values, wanted, strict=True)]
    return sum(away) + 0.3 * sum(1 - math.cos(6 * a) for a in away)


def test_the_lowest_point_is_found() -> None:
    """Among many local ones."""
    found = minimise(valley, BOUNDS, seed=0, generations=120, population=24)
    assert found.values == pytest.approx((1.5, -2.0, 0.25), abs=0.05)
    assert found.objective == valley(found.values)
    assert found.evaluations == 24 * 121


def test_the_same_seed_finds_the_same() -> None:
    """To the last digit; another seed does not."""
    first, again, other = (minimise(valley, BOUNDS, seed=s, generations=3, population=8) for s in (1, 1, 2))
    assert first == again != other


def test_what_is_judged_is_what_is_returned() -> None:
    """Values are rounded before they are judged, and stay within their bounds."""
    seen = []

    def objective(values: tuple[float, ...]) -> float:
        seen.append(values)
        return values[0]

    minimise(objective, BOUNDS, seed=0, generations=5, population=8)
    for values in seen:
        assert all(low <= value <= high for value, (low, high) in zip(values, BOUNDS, strict=True))
        assert all(value == float(f"{value:.{DIGITS}g}") for value in values)


@pytest.mark.parametrize("edge", [0.03, 0.7, 1.0, 33.3])
def test_the_highest_rate_that_holds(edge: float) -> None:
    """To the precision, from below, wherever it lies."""
    found = highest(lambda rate: rate <= edge, precision=0.01)
    assert edge / 1.01 <= found <= edge


def test_no_rate_and_every_rate() -> None:
    """0 where none holds; an SLO that every rate meets has no goodput."""
    assert highest(lambda rate: False, precision=0.01) == 0.0
    with pytest.raises(ConfigError, match="no goodput"):
        highest(lambda rate: True, precision=0.01)


def test_goodput_falls_with_the_slo() -> None:
    """The published deployment: a tighter TTFT, a lower goodput; a target that cannot be is refused."""
    fleet = load("mi300x").fleet(Mode.WRITE, prefills=1, decodes=1)
    loose, tight = (goodput(fleet, Job(2000, 100), Slo(ttft=ttft, itl=0.05), requests=60) for ttft in (1.0, 0.4))
    assert 0 < tight < loose
    with pytest.raises(ConfigError, match="target"):
        goodput(fleet, Job(10, 10), Slo(ttft=1.0), requests=10, target=0.0)


def test_splits_are_all_there_best_first() -> None:
    """Three engines have two splits; long prompts with short answers want two for prefill."""
    found = splits(load("mi325x"), Job(16384, 16), Slo(ttft=5.0), 3, mode=Mode.READ, requests=40)
    assert [one.label for one in found] == ["2P:1D", "1P:2D"]
    assert found[0].goodput > found[1].goodput
    with pytest.raises(ConfigError, match="two engines"):
        splits(load("mi325x"), Job(10, 10), Slo(ttft=5.0), 1, mode=Mode.READ, requests=10)


@pytest.mark.parametrize("count", [1, 2, 3, 50, 100, 101, 999])
def test_p99_is_numpys(count: int) -> None:
    """To the last bits, for any number of gaps."""
    gaps = np.random.default_rng(count).exponential(size=count)
    assert p99_of(gaps) == pytest.approx(float(np.percentile(gaps, 99)), rel=1e-14)
