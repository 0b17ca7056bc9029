"""What holds for every test."""

import gc
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that was run in the test's own process has set the log up for a stream that closes with the test."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="module")
def _leaks_are_its_own() -> Iterator[None]:
    """What a module's tests left open is found at its end; else a later module's test would be blamed for it."""
    yield
    gc.collect()
    gc.freeze()  # what is alive now is not looked through again: the next module's collection costs milliseconds
