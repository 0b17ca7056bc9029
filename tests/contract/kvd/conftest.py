"""What these modules share."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdserve.kvd.testing.mori import FAKE
from pdserve.kvd.transport.mori_process import Library
from pdserve.kvd.transport.start import Command
from tests.forked.forks import Forked, Zygote


@pytest.fixture(scope="session")
def forked() -> Iterator[Library]:
    """The fake mori, with processes that start in milliseconds."""
    zygote = Zygote("tests.contract.kvd.mori_forks")

    async def start(command: Command) -> Forked:
        return zygote.fork((command.module, *command.args), command.env, command.words, command.fds)

    yield replace(FAKE, start=start)
    zygote.close()
