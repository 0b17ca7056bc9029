"""One number is written as the same microseconds wherever it stands."""

import random

import pytest

from pdserve.cli import rounding


@pytest.mark.parametrize(
    ("ns", "us"),
    [(0, 0), (499, 0), (500, 0), (501, 1), (1500, 2), (2500, 2), (2501, 3), (609_321_500, 609_322), (-1500, -2)],
)
def test_half_goes_to_the_even_one(ns: int, us: int) -> None:
    """Of the whole nanoseconds, whatever a float makes of them."""
    assert rounding.microseconds(ns / 1e9) == us


def test_the_rounded_parts_sum_to_the_rounded_whole() -> None:
    """Whatever the parts: none is off by a microsecond or more, and their sum is exact."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(500):
        ns = [dice.randrange(0, 10 ** dice.randrange(1, 10)) for _ in range(dice.randrange(1, 15))]
        whole = sum(ns) / 1e9
        shares = rounding.apportioned([value / 1e9 for value in ns], whole)
        assert shares is not None
        assert sum(shares) == rounding.microseconds(whole)
        assert all(abs(us - value / 1000) < 1 for us, value in zip(shares, ns, strict=True))


def test_what_does_not_add_up_is_not_made_to() -> None:
    """Half a microsecond is the noise of floats; more is a contradiction, and each part keeps its own rounding."""
    assert rounding.apportioned([0.001, 0.002], 0.003_000_4) == [1000, 2000]
    assert rounding.apportioned([0.001, 0.002], 0.002_999_5) == [1000, 2000]
    assert rounding.apportioned([0.001, 0.002], 0.003_001) is None
    row = {"parts": {"a": 0.000_001_6}, "unattributed": None, "ttft": 0.5}
    assert rounding.of_request(row) == {"a": 2, "unattributed": 0}
    assert rounding.of_request(row | {"failed_in": "a", "failed_after": 0.000_001_6}) == {"a": 2, "unattributed": 0}
