"""How the report writes numbers and places labels."""

import itertools
import random

import pytest

from pdserve.bench.report import words
from pdserve.bench.report.layout import apart


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.000214, "0.214 ms"),
        (0.05, "50.0 ms"),
        (0.312, "312 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (41.23, "41.2 s"),
        (1234.5, "1234 s"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_suits_it(value: float | None, said: str) -> None:
    """Rounding never leaves a fourth digit, and no digit before the point is lost."""
    assert words.seconds(value) == said


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.0, "100 %"), (0.9999, "> 99.9 %"), (0.974, "97.4 %"), (0.73, "73 %"), (0.0002, "< 0.1 %"), (0.0, "0 %")],
)
def test_only_a_whole_share_is_called_whole(share: float, said: str) -> None:
    """One miss in ten thousand is not 100 %, one hit not 0 %."""
    assert words.percent(share) == said


def test_objectives_are_written_as_the_user_wrote_them() -> None:
    """No digits are made up: 1 s is not 1.00 s."""
    assert [words.objective(value) for value in (1.0, 0.05, 0.0125, 2.5)] == ["1 s", "50 ms", "12.5 ms", "2.5 s"]


@pytest.mark.parametrize("seed", range(20))
def test_labels_keep_their_distance_their_order_and_their_room(seed: int) -> None:
    """Wherever lines end, their names do not overlap, do not cross and stay inside, if there is room for them."""
    chance = random.Random(seed)
    print("seed", seed)
    many = chance.randint(1, 18)
    wanted = [chance.uniform(-20, 320) for _ in range(many)]
    places = apart(wanted, 17, 0, 300)
    ordered = sorted(range(many), key=lambda index: wanted[index])
    along = [places[index] for index in ordered]
    assert all(later - before >= 17 - 1e-6 for before, later in itertools.pairwise(along))
    assert min(places) >= -1e-6
    assert max(places) <= 300 + 1e-6


def test_labels_that_have_room_stay_where_they_belong() -> None:
    """Nothing moves without need."""
    assert apart([10, 200, 100], 17, 0, 300) == [10, 200, 100]


def test_more_labels_than_room_are_spread_evenly() -> None:
    """They get closer than asked, but none leaves the figure and none hides another."""
    assert apart([5, 5, 5], 200, 0, 300) == [0, 150, 300]
    assert apart([], 17, 0, 300) == []
