"""The daemon behind the doors."""

from collections.abc import AsyncIterator

import pytest

from pdserve.kvd.testing import RunningKvd, running_kvd


@pytest.fixture
async def kvd() -> AsyncIterator[RunningKvd]:
    """A real daemon."""
    async with running_kvd(limits=None) as made:
        yield made
