"""A whole fleet in the test's process: kvd, proxy, prefill and decode services on simulated engines.

Real: the proxy's two faces, every gRPC, ZMQ and Unix socket, the registration, the KV memory and its
copies. Simulated: the model. Engines check every byte that they get, and `Gate`s let a test stop an
engine's steps or the link at a point it names, so that races are ordered and not slept for.

At the end of every test nothing may be left: see `Fleet.close`.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging as levels
import os
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import structlog

from pdserve.client import AsyncClient, AsyncStream, Completion, Retry
from pdserve.decode.__main__ import PROGRAM as DECODE
from pdserve.decode.session import DecodeConfig
from pdserve.engine.hosting import process
from pdserve.engine.hosting.factory import EngineChoice, EngineConfig, EngineKind
from pdserve.engine.hosting.program import HostConfig, Parts, Plan, Program
from pdserve.engine.port import Output, Request, Sampling
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
from pdserve.proxy.tracing.sink import TraceSink
from pdserve.proxy.types import EngineCard, OnFailure
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import EngineDied, PdserveError
from pdserve.rpc.status import to_error
from pdserve.runtime.clock import Clock
from pdserve.runtime.lifecycle import Shutdown
from pdserve.runtime.registration import RegistrationConfig
from pdserve.runtime.telemetry.span import Export
from pdserve.runtime.testing import Gate

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))
WAIT_S = 20.0
"""Longest wait for anything that a test expects; the box may be busy."""
LONG = Limits(lease=300.0, accept=300.0, transfer=300.0, park=300.0, tie=300.0)
"""No deadline of kvd comes to a test's help: what ends, ends because somebody ended it."""
STEADY = 3600.0
"""Seconds between beats where a test holds an engine still, which beats would call stuck."""

_LONGEST = ("test_sim_compare.py", "test_sim_start.py", "test_sim_profile.py", "test_sim_storm.py")
"""They start processes, or wait for a clock."""
_USUAL: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "timeout": 2 * WAIT_S}


async def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Waits for what has no event of its own.

    Raises:
        AssertionError: not within `seconds`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not so within {seconds} s"
        await asyncio.sleep(0.002)


@dataclass(eq=False)
class Service:
    """One hosted engine."""

    engine: SimEngine
    parts: Parts
    steps: Gate
    """Passed once a step, or once a layer in a step whose layers are told to kvd."""
    shutdown: Shutdown
    task: asyncio.Task[None]
    role: str
    gone: bool = False
    """It did not end in order."""

    @property
    def engine_id(self) -> str:
        """Fresh at every start."""
        return self.engine.info.engine_id


def posing(config: SimConfig, identity: Mapping[str, str]) -> SimConfig:
    """The same engine under another identity."""

    class Posing(SimConfig):
        def identity(self) -> dict[str, str]:
            return SimConfig.identity(self) | dict(identity)

    return Posing(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


class Fleet:
    """See the module; made by the fixture `launch`."""

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
        self.corrupt = 0
        """Requests with wrong bytes that the test has arranged for."""
        self.may_expire = False
        """Whether a deadline of kvd may have run out."""
        self._stack = stack
        self._beat_seconds = beat_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._reference: SimEngine | None = None
        self._numbers = itertools.count(1)
        self._before = asyncio.all_tasks()

    # -- building ---------------------------------------------------------------------------

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

    # -- asking -----------------------------------------------------------------------------

    async def ask(self, prompt: Any, **fields: Any) -> Completion:
        """One request over gRPC, greedy and short where nothing else is said."""
        return await self.client.generate(prompt, **(_USUAL | fields))

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """(status, body) over HTTP; `body` bytes go out as they are."""
        sent: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(path, headers=headers, **sent) as response:
            return response.status, await response.json()

    def stream(self, prompt: Any, **fields: Any) -> AsyncStream:
        """One request over gRPC, as its tokens come."""
        return self.client.stream(prompt, **(_USUAL | fields))

    async def alone(self, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> tuple[int, ...]:
        """What one engine, that knows of no hand-over, answers."""
        if self._reference is None:
            self._reference = await SimEngine.start(self.sim.with_(num_blocks=4096, prefix_cache=False), None)
            self._stack.push_async_callback(self._reference.aclose)
        greedy = {"max_tokens": max_tokens, "temperature": 0.0} | sampling
        request = Request(f"alone-{next(self._numbers)}", tuple(prompt), Sampling(**greedy))
        return tuple(token for output in await outputs(self._reference, request) for token in output.token_ids)

    async def local(self, service: Service, prompt: Sequence[int], max_tokens: int) -> list[Output]:
        """Traffic of the engine's own, beside what comes through the services."""
        request = Request(
            f"local-{next(self._numbers)}", tuple(prompt), Sampling(max_tokens=max_tokens, temperature=0.0)
        )
        return await outputs(service.engine, request)

    # -- the services ----------------------------------------------------------------------

    def card(self, service: Service) -> EngineCard:
        """What the proxy knows of an engine: address, locator, identity."""
        entry = self.proxy.registry.get(service.engine_id)
        assert entry is not None, "the engine has left the proxy"
        return entry.card

    async def channel(self, address: str) -> grpc.aio.Channel:
        """To any server of the fleet, past the SDK; closed with the fleet."""
        if address not in self._channels:
            self._channels[address] = await self._stack.enter_async_context(aio_channel(address))
        return self._channels[address]

    @staticmethod
    async def refusal(call: Any) -> PdserveError:
        """The typed error that ends a call."""
        try:
            while await asyncio.wait_for(call.read(), WAIT_S) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return to_error(error)
        raise AssertionError("the call ended well")

    until = staticmethod(until)

    # -- what is left -----------------------------------------------------------------------

    def held(self) -> list[str]:
        """What anything still holds, in words."""
        found = []
        for service in (*self.prefills, *self.decodes):
            name = f"{service.role} {service.engine_id[:8]}"
            if service.gone:
                continue
            load = service.engine.load()
            if not service.engine.idle:
                found.append(f"{name}: {load.running} running, {load.waiting} waiting requests, or blocks on offer")
            if load.free_kv_tokens != load.total_kv_tokens:
                found.append(f"{name}: {load.total_kv_tokens - load.free_kv_tokens} KV tokens")
            if len(service.parts.calls):
                found.append(f"{name}: {len(service.parts.calls)} calls")
        found += [f"proxy: {n} tokens on {e[:8]}" for e, n in self.reserved().items() if n]
        topology = self.proxy.inference.topology()
        if topology.queued or topology.in_flight:
            found.append(f"proxy: {topology.queued} queued, {topology.in_flight} in flight")
        book = self.kvd.node.transfers.book
        counts = {
            "transfers": len(book.transfers),
            "handles": len(book.handles),
            "copies": len(book.ops),
            "orphans": len(book.orphans),
            "leases": len(self.kvd.node.leases),
        }
        return found + [f"kvd: {count} {name}" for name, count in counts.items() if count]

    def landed(self) -> int:
        """Bytes that have landed of hand-overs that go on."""
        transfers = self.kvd.node.transfers.book.transfers.values()
        return sum(consumer.bytes_landed for transfer in transfers for consumer in transfer.consumers.values())

    def producers(self) -> list[str]:
        """States of the producers' ends of hand-overs that go on."""
        transfers = self.kvd.node.transfers.book.transfers.values()
        return [transfer.producer.state.value for transfer in transfers if transfer.producer is not None]

    def consumers(self) -> list[str]:
        """States of the consumers' ends of hand-overs that go on."""
        transfers = self.kvd.node.transfers.book.transfers.values()
        return [consumer.state.value for transfer in transfers for consumer in transfer.consumers.values()]

    def copying(self) -> int:
        """Copies under way."""
        return len(self.kvd.node.transfers.book.ops)

    def reserved(self) -> dict[str, int]:
        """KV tokens that the proxy has reserved, by engine."""
        entries = self.proxy.registry.entries()
        return {entry.card.engine_id: self.proxy.ledger.reserved(entry.card.engine_id) for entry in entries}

    def ended(self) -> dict[str, int]:
        """How many handles ended at kvd, by outcome or reason."""
        return dict(self.kvd.node.transfers.book.ended)

    async def settled(self, seconds: float = WAIT_S) -> None:
        """Waits until nothing is held and checks the books.

        Raises:
            AssertionError: something is still held after `seconds`; says what.
        """
        try:
            await until(lambda: not self.held(), seconds)
        except AssertionError:
            raise AssertionError(f"still held after {seconds} s: {self.held()}") from None
        self.kvd.node.transfers.check()
        assert self.kvd.node.defects == 0
        services = [service for service in (*self.prefills, *self.decodes) if not service.gone]
        for service in services:
            service.engine.integrity()
        assert sum(service.engine.corrupt for service in services) == self.corrupt
        assert self.may_expire or "TRANSFER_EXPIRED" not in self.ended(), self.ended()

    async def close(self) -> None:
        """Everything in reverse; every block is back before, and no task is left behind."""
        try:
            self.link.open()
            for service in (*self.prefills, *self.decodes):
                service.steps.open()
            await self.settled()
        finally:
            await self._stack.aclose()
        if left := self._left():
            await asyncio.wait(left, timeout=2.0)
        left = self._left()
        assert not left, left

    def _left(self) -> set[asyncio.Task[Any]]:
        return {task for task in asyncio.all_tasks() - self._before if task is not asyncio.current_task()}


Launch = Callable[..., Awaitable[Fleet]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first. Of several workers one begins with them, file by file, and the others take from its
    end: nobody waits for them at the end of the run, and what a file prepares once is not prepared by each worker."""
    here = Path(__file__).parent
    order = {here / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    """A failed test shows what every part said, from PDSERVE_TEST_LOG up: "info", or "debug" for all."""
    before = structlog.get_config()
    level = getattr(levels, os.environ.get("PDSERVE_TEST_LOG", "info").upper())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    yield
    structlog.configure(**before)


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Starts a fleet, and checks and ends it after the test.

    `prefills`, `decodes`: engines; `bandwidth`: bytes a second of a simulated link, None copies as
    kvd does; `limits`, `grace`: kvd's; `proxy`: its settings, `traces` takes its spans; `beat_seconds`; the rest
    is SimConfig.
    """
    async with AsyncExitStack() as closing:

        async def start(
            *,
            prefills: int = 1,
            decodes: int = 1,
            bandwidth: float | None = None,
            limits: Limits = LONG,
            grace: float = 2.0,
            beat_seconds: float = STEADY,
            proxy: dict[str, Any] | None = None,
            traces: Export | None = None,
            **sim: Any,
        ) -> Fleet:
            stack = AsyncExitStack()
            fleet = Fleet(stack, SimConfig(**sim), beat_seconds)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sim"))
            try:
                await fleet.start_kvd(Path(folder), limits, bandwidth, grace)
                await fleet.start_proxy({"on_failure": OnFailure.FAIL} | (proxy or {}), traces)
                for role, count in (("prefill", prefills), ("decode", decodes)):
                    await asyncio.gather(*(fleet.host(role) for _ in range(count)))
                await fleet.start_clients()
            except BaseException:
                await stack.aclose()
                raise
            closing.push_async_callback(fleet.close)
            return fleet

        yield start


@pytest.fixture
async def fleet(launch: Launch) -> Fleet:
    """One prefill and one decode engine."""
    return await launch()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """What a test draws; the same for the same seed."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def prompt(rng: random.Random) -> Callable[[int], tuple[int, ...]]:
    """`prompt(n)`: n tokens that were never seen before."""
    return lambda n: tuple(rng.randrange(256) for _ in range(n))


async def outputs(engine: SimEngine, request: Request) -> list[Output]:
    """All that an engine says to one request."""
    async with contextlib.aclosing(engine.generate(request)) as stream:
        return [output async for output in stream]
