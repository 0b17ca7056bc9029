"""A real proxy on loopback ports with fake engines; what is fake: the engines' answers, no kvd."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pdserve.proxy.app import ProxyApp
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.testing import FakeEngine, Handovers
from pdserve.runtime import flags
from pdserve.runtime.clock import Clock
from pdserve.runtime.signing import Signer
from tests.unit.telemetry.collector import Collector
from tests.waiting import until

KEY = b"a key for tests only"


class Deployment:
    """A proxy and the fake engines behind it."""

    def __init__(self, app: ProxyApp, stack: AsyncExitStack) -> None:
        self.app = app
        self.signer = Signer(KEY)
        self.handovers = Handovers()
        self._stack = stack

    async def engine(self, role: Any, **settings: Any) -> FakeEngine:
        """Starts and registers an engine; returns once the proxy may route to it."""
        engine = FakeEngine(role, self.signer, self.handovers, **settings)
        self._stack.push_async_callback(engine.stop)
        await engine.start()
        reply = await engine.register(self.app.addresses.registration)
        assert reply.ok, reply
        await self.routable(engine)
        return engine

    async def routable(self, engine: FakeEngine) -> None:
        """Waits until the engine's channel is up."""

        def connected() -> bool:
            entry = self.app.registry.get(engine.engine_id)
            return entry is not None and entry.connected

        await until(connected)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that nothing signals."""
        await until(condition)

    def held(self) -> int:
        """KV tokens that the proxy has reserved on all engines."""
        return sum(self.app.ledger.reserved(entry.card.engine_id) for entry in self.app.registry.entries())


Deploy = Callable[..., Awaitable[Deployment]]


@pytest.fixture
async def deploy() -> AsyncIterator[Deploy]:
    """Starts a proxy; its settings are the arguments."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Deployment:
            usual = {"beat_interval": 60.0, "beats_settle": 0, "hold_timeout": 0.0}
            config = flags.from_mapping(ProxyConfig, usual | settings)
            app = await ProxyApp.start(config, Signer(KEY), Clock(), os.urandom)
            stack.push_async_callback(app.aclose)
            return Deployment(app, stack)

        yield start


@pytest.fixture
async def pair(deploy: Deploy) -> tuple[Deployment, FakeEngine, FakeEngine]:
    """A proxy with one prefill and one decode engine."""
    deployment = await deploy()
    return deployment, await deployment.engine("prefill"), await deployment.engine("decode")


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Served, and named by the environment."""
    collector = Collector()
    await collector.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    yield collector
    await collector.kill()
