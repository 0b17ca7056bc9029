"""SIGKILL to each service of a deployment in turn; the tests share it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.asking import MODES, answer_over_grpc, answer_over_http
from tests.compose.deployment import SERVICES, Deployment, deployed

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def deployment(compose: Path, images: None) -> Iterator[Deployment]:
    """A deployment that serves."""
    with deployed(compose, "pdserve-test-killed") as made:
        asyncio.run(made.compose("up", "--detach", "--wait", "--no-build"))
        yield made


@pytest.mark.parametrize("service", SERVICES)
async def test_a_killed_service_comes_back(deployment: Deployment, service: str) -> None:
    """After SIGKILL the engine starts it again, the others find it, and requests are answered as before."""
    await deployment.killed(service)
    for mode in MODES:
        await answer_over_grpc(deployment, mode)
        await answer_over_http(deployment, mode)
