"""Legs for the fleets of these tests."""

import pytest

from tests.sim.fleet import Fleet
from tests.sim.services.legs import Legs


@pytest.fixture
def legs(fleet: Fleet) -> Legs:
    """For the fleet of one pair."""
    return Legs(fleet)
