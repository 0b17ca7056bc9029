"""The world of decode's tests."""

from collections.abc import AsyncIterator

import pytest

from pdserve.decode.session import DecodeConfig
from tests.unit.decode.world import World


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Served; at its end nothing is held."""
    async with World(getattr(request, "param", DecodeConfig())).serving() as world:
        yield world
