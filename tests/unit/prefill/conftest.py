"""The world of prefill's tests."""

from collections.abc import AsyncIterator

import pytest

from pdserve.prefill.session import PrefillConfig
from tests.unit.prefill.world import World


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Served; at its end nothing is held."""
    async with World(getattr(request, "param", PrefillConfig())).serving() as world:
        yield world
