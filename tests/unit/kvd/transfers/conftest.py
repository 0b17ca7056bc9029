"""The core of a daemon, with the engines of most transfers."""

import pytest

from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import CoreDriver


@pytest.fixture
def driver() -> CoreDriver:
    """A core with a producer engine P and a consumer engine C, two layers, 16 blocks."""
    made = CoreDriver(Limits(lease=30, accept=10, transfer=30, fence=5, park=20, tie=2))
    made.engine("P")
    made.engine("C")
    return made
