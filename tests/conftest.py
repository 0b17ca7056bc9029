"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that was run in the test's own process has set the log up for a stream that closes with the test."""
    yield
    structlog.reset_defaults()
