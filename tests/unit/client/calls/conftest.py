"""Both clients against a fake proxy over real gRPC."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from pdserve.client import (
    AsyncClient,
    Client,
    Retry,
)
from pdserve.client.testing import FakeProxy
from tests.unit.client.calls.waits import WAIT, Waits


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with FakeProxy() as fake:
        yield fake


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile: it is bound, and does not listen."""
    with socket.socket() as hold:
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold.bind(("127.0.0.1", 0))
        yield int(hold.getsockname()[1])


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def client(proxy: FakeProxy, waits: Waits) -> Iterator[Client]:
    retry = Retry(attempts=3)
    with Client(proxy.target, timeout=WAIT, retry=retry, random=lambda: 0.0, sleep=waits.sleep) as made:
        yield made


@pytest.fixture
async def aclient(proxy: FakeProxy, waits: Waits) -> AsyncIterator[AsyncClient]:
    retry = Retry(attempts=3)
    async with AsyncClient(
        proxy.target, timeout=WAIT, retry=retry, random=lambda: 0.0, sleep=waits.sleep_async
    ) as made:
        yield made
