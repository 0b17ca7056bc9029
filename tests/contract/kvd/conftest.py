"""What these modules share."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdserve.kvd.testing.mori import FAKE
from pdserve.kvd.transport.mori_process import Library
from tests.contract.kvd.forks import Zygote


@pytest.fixture(scope="session")
def forked() -> Iterator[Library]:
    """The fake mori, with processes that start in milliseconds."""
    zygote = Zygote()
    yield replace(FAKE, start=zygote.start)
    zygote.close()
