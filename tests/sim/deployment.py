"""The parts of a fleet in the test's process: how each is started, and how it is ended."""

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from pdserve.client import AsyncClient, Retry
from pdserve.decode.__main__ import PROGRAM as DECODE
from pdserve.decode.session import DecodeConfig
from pdserve.engine.hosting import process
from pdserve.engine.hosting.factory import EngineChoice, EngineConfig, EngineKind
from pdserve.engine.hosting.program import HostConfig, Parts, Plan, Program
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import FaultPlan, RunningKvd, running_kvd
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.transport.sim import SimTransport
from pdserve.prefill.__main__ import PROGRAM as PREFILL
from pdserve.prefill.session import PrefillConfig
from pdserve.proxy.app import ProxyApp
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.testing import TraceSink
from pdserve.rpc.errors import EngineDied
from pdserve.runtime.clock import Clock
from pdserve.runtime.lifecycle import Shutdown
from pdserve.runtime.registration import RegistrationConfig
from pdserve.runtime.telemetry.span import Export
from pdserve.runtime.testing import Gate
from tests.sim.hosted import Service, posing
from tests.waiting import WAIT_S, until

LONG = Limits(lease=300.0, accept=300.0, transfer=300.0, park=300.0, tie=300.0)
"""No deadline of kvd comes to a test's help: what ends, ends because somebody ended it."""
STEADY = 3600.0
"""Seconds between beats where a test holds an engine still, which beats would call stuck."""


class Deployment:
    """kvd, the proxy, its services and a client for each face. `Fleet` is what tests do with them."""

    def __init__(self, stack: AsyncExitStack, sim: SimConfig, beat_seconds: float) -> None:
        self.sim = sim
        self.prefills: list[Service] = []
        self.decodes: list[Service] = []
        self.link = Gate()
        """Passed once a copy, where the link is simulated."""
        self.faults = FaultPlan()
        """Of the simulated link."""
        self.kvd: RunningKvd
        self.proxy: ProxyApp
        self.client: AsyncClient
        self.http: aiohttp.ClientSession
        self._stack = stack
        self._beat_seconds = beat_seconds

    async def start_kvd(self, folder: Path, limits: Limits, bandwidth: float | None, grace: float) -> None:
        """`bandwidth` in bytes a second makes the link a simulated one."""

        def transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
            if bandwidth is None:
                return (ShmTransport(arena),)
            return (SimTransport(arena, bandwidth, faults=self.faults, sleep=self.link.sleep),)

        self._kvd_settings = (folder, limits, bandwidth, grace)
        self._kvd = await self._stack.enter_async_context(AsyncExitStack())
        self.kvd = await self._kvd.enter_async_context(
            running_kvd(folder, limits=limits, grace=grace, transports=transports)
        )

    async def stop_kvd(self) -> None:
        """As a SIGTERM twice."""
        await self._kvd.aclose()

    async def restart_kvd(self) -> None:
        """Ends the daemon and starts another at the same place."""
        await self.stop_kvd()
        await self.start_kvd(*self._kvd_settings)

    async def start_proxy(self, settings: dict[str, Any], traces: Export | None) -> None:
        """With a client for each face; neither tries again by itself. `traces` takes the spans. Who finds no engine is
        told at once, where the settings do not say otherwise."""
        usual = {"beat_interval": max(1.0, 4 * self._beat_seconds), "beats_settle": 0, "hold_timeout": 0.0}
        config = ProxyConfig(**(usual | settings))
        sink = TraceSink(traces, Clock()) if traces else None
        self.proxy = await ProxyApp.start(config, self.kvd.signer, Clock(), os.urandom, sink)
        self._stack.push_async_callback(self.proxy.aclose)

    async def start_clients(self) -> None:
        """Of both faces, and without the SDK's own retries."""
        where = self.proxy.addresses
        self.client = await self._stack.enter_async_context(AsyncClient(where.grpc, retry=Retry(attempts=1)))
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(f"http://{where.http}"))

    async def host(
        self,
        role: str,
        *,
        config: Any = None,
        identity: Mapping[str, str] | None = None,
        key: Path | None = None,
        kvd: bool = True,
        **sim: Any,
    ) -> Service:
        """One more service; returns once the proxy may route to it.

        `config`: the service's own settings; `identity`: what the engine says to be beyond what it is;
        `key`: its cluster key; `sim` changes single settings of the engine.
        """
        program: Program[Any] = PREFILL if role == "prefill" else DECODE
        service = config or (PrefillConfig() if role == "prefill" else DecodeConfig())
        gate, shutdown, caught = Gate(), Shutdown(), list[Parts]()

        async def build(choice: EngineChoice) -> SimEngine:
            socket = choice.config.kvd_socket
            return await SimEngine.start(choice.sim, str(socket) if socket else None, sleep=gate.sleep)

        def add(parts: Parts, settings: Any) -> None:
            caught.append(parts)
            program.add(parts, settings)

        plan = Plan(
            HostConfig(proxy=self.proxy.addresses.registration, drain_seconds=10.0, cluster_key_file=key),
            EngineChoice(
                EngineConfig(EngineKind.SIM, kvd_socket=Path(self.kvd.socket) if kvd else None),
                posing(self.sim.with_(**sim), identity or {}),
            ),
            RegistrationConfig(beat_seconds=self._beat_seconds),
            service,
            role,  # type: ignore[arg-type]  # a test's own literal
        )
        serving = process.serve(dataclasses.replace(program, add=add), plan, shutdown, build)
        task = asyncio.create_task(serving, name=f"{role} service")
        await until(lambda: task.done() or bool(caught))
        if task.done():
            task.result()
        engine = caught[0].engine
        assert isinstance(engine, SimEngine)
        hosted = Service(engine, caught[0], gate, shutdown, task, role)
        self._stack.push_async_callback(self._close_service, hosted)
        await until(lambda: task.done() or self.routable(hosted))
        if task.done():
            hosted.gone = True
            task.result()
        (self.prefills if role == "prefill" else self.decodes).append(hosted)
        return hosted

    def routable(self, service: Service) -> bool:
        """Whether the proxy may send requests to it."""
        entry = self.proxy.registry.get(service.engine_id)
        return entry is not None and entry.routable

    async def kill(self, service: Service) -> None:
        """Ends an engine as the death of its process would; the service goes with it."""
        service.gone = True
        service.steps.open()
        await service.engine.kill("killed by the test")
        await asyncio.wait({service.task}, timeout=WAIT_S)
        assert isinstance(service.task.exception(), EngineDied)

    async def leave(self, service: Service) -> None:
        """Drains and ends a service; the proxy hears its goodbye."""
        (self.prefills if service.role == "prefill" else self.decodes).remove(service)
        await self._close_service(service)
        await until(lambda: self.proxy.registry.get(service.engine_id) is None)

    async def _close_service(self, service: Service) -> None:
        service.steps.open()
        service.shutdown.request()
        done, _ = await asyncio.wait({service.task}, timeout=WAIT_S)
        assert done, "a service did not end"
        if not service.gone:
            service.task.result()
