"""A process that hosts one engine behind gRPC: builds everything in order, closes in reverse.

    engine -> kvd attachment -> server (NOT_SERVING) -> registration -> SERVING
    ... first signal: NOT_SERVING, "draining" to the proxy, open calls end, "bye" ...
    registration <- calls <- server <- kvd attachment <- engine

The engine comes first because vLLM forks, which gRPC does not survive.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from pdserve.engine import factory
from pdserve.engine.announcing import Announcer
from pdserve.engine.factory import EngineChoice, EngineConfig
from pdserve.engine.handoffs import Handoffs
from pdserve.engine.host import HandoffHost
from pdserve.engine.peers import Peers
from pdserve.engine.port import Engine
from pdserve.rpc.errors import ConfigError, EngineDied, PdserveError
from pdserve.runtime import flags, log
from pdserve.runtime.beats import Role
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import advertised_host, check_bind, join_address, load_cluster_key, split_address
from pdserve.runtime.lifecycle import Shutdown, Tasks, serve_until_shutdown
from pdserve.runtime.registration import Registration, RegistrationConfig
from pdserve.runtime.server import Server
from pdserve.runtime.signing import Signer

S = TypeVar("S")
Build = Callable[[EngineChoice], Awaitable[Engine]]

_LAST_WORDS = 0.5
"""Seconds in which calls that were stopped can still tell their callers why."""

said = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Where the service is, and whom it tells."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """TCP port; 0 takes a free one, which the log and the proxy are told."""
    advertise_host: str = ""
    """Host under which the proxy reaches this service; empty: the bound one, or what a route says."""
    proxy: str = ""
    """`host:port` of the proxy's registration socket (--ping-port); empty: none is told."""
    role: str = ""
    """What the engine is tuned for; empty: the command's own."""
    cluster_key_file: Path | None = None
    """File with the key that every member of the cluster has."""
    insecure: bool = False
    """Bind more than loopback without a cluster key."""
    drain_seconds: float = 30.0
    """Longest wait for open requests after the first signal, seconds."""
    locator_seconds: float = 600.0
    """Life of the locator in each beat, seconds; longer than a request may wait for its engine."""
    log_format: log.LogFormat = log.LogFormat.AUTO
    """How the log looks."""
    log_level: log.LogLevel = log.LogLevel.INFO
    """Least severe event in the log."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} is not in 0..65535")
        if self.drain_seconds < 0 or self.locator_seconds <= 0:
            raise ValueError("drain_seconds must be at least 0, locator_seconds above 0")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a service is made of."""

    engine: Engine
    handoffs: Handoffs | None
    """None: no kvd."""
    peers: Peers
    calls: Calls
    clock: Clock
    server: Server


@dataclass(frozen=True, slots=True)
class Program(Generic[S]):
    """One of the commands that host an engine."""

    name: str
    """Of the command."""
    service: str
    """Full name of its gRPC service."""
    roles: tuple[Role, ...]
    """It may advertise; the first where nothing is said."""
    settings: type[S]
    """Config of the service itself."""
    add: Callable[[Parts, S], None]
    """Adds the servicer to `parts.server`."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[S]):
    """A command line that was understood."""

    host: HostConfig
    engine: EngineChoice
    beats: RegistrationConfig
    service: S
    role: Role


def read(program: Program[S], argv: Sequence[str]) -> Plan[S]:
    """Understands a command line.

    Raises:
        ConfigError: settings that cannot work.
        SystemExit: `--help`, or flags that argparse refuses.
    """
    own, passthrough = flags.split_passthrough(argv)
    parser = argparse.ArgumentParser(
        program.name, description=program.add.__doc__, epilog="What follows -- goes to vLLM.", allow_abbrev=False
    )
    factory.add_flags(parser)
    for config in (HostConfig, RegistrationConfig, program.settings):
        flags.add_flags(parser, config)
    args = parser.parse_args(own)
    host = flags.from_args(HostConfig, args)
    role = next((role for role in program.roles if role == (host.role or program.roles[0])), None)
    if role is None:
        raise ConfigError(f"{program.name} has no role {host.role}: it is {' or '.join(program.roles)}")
    engine = factory.choose(args, tuple(passthrough))
    if engine.config.kvd_socket is None and role != "both":
        raise ConfigError(f"a {role} service hands KV over: it needs --kvd-socket")
    if host.proxy:
        split_address(host.proxy)
    return Plan(host, engine, flags.from_args(RegistrationConfig, args), flags.from_args(program.settings, args), role)


def main(program: Program[Any], argv: Sequence[str] | None = None) -> int:
    """Runs a command to its end. Returns the process' exit status: 0 after a drain or a stop, 2 for
    settings that cannot work, 1 for any other failure."""
    log.setup(program.name)
    try:
        plan = read(program, sys.argv[1:] if argv is None else argv)
        log.setup(program.name, plan.host.log_format, plan.host.log_level)
        asyncio.run(_run(program, plan))
    except PdserveError as error:
        said.error("ended", reason=error.reason, detail=error.message)
        return 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, asyncio.CancelledError) as left:
        return 128 + (signal.SIGINT if isinstance(left, KeyboardInterrupt) else signal.SIGTERM)
    return 0


async def _run(program: Program[S], plan: Plan[S]) -> None:
    """While the engine starts there is nothing to drain: SIGTERM cancels it, as asyncio does for SIGINT."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def leave(number: int, frame: object) -> None:
        if task is not None and not task.cancelling():
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes the loop
        else:
            raise SystemExit(128 + number)  # a start that blocks the loop, and a sender that insists

    # Not the loop's own handlers yet: a child that vLLM forks under them would write its signals to our loop.
    signal.signal(signal.SIGTERM, leave)
    await serve(program, plan)


async def serve(
    program: Program[S], plan: Plan[S], shutdown: Shutdown | None = None, build: Build | None = None
) -> None:
    """Hosts until a signal, or until `shutdown` is requested where one is given. `build` makes the
    engine in place of `factory.build_engine`.

    Raises:
        PdserveError: what kept it from starting, or what ended it.
    """
    host, clock = plan.host, Clock()
    key = load_cluster_key(host.cluster_key_file)
    check_bind(host.host, key, insecure=host.insecure)
    signer = Signer(key.secret)
    said.info("starting", engine=plan.engine.config.engine.value, role=plan.role)
    async with AsyncExitStack() as stack:
        engine = await (build or factory.build_engine)(plan.engine)
        stack.push_async_callback(engine.aclose)
        handoffs = await _attach(stack, plan.engine.config, engine)
        kvd_address = f"unix:{plan.engine.config.kvd_socket}" if handoffs else ""
        parts = Parts(
            engine, handoffs, Peers(engine.info, kvd_address, signer), Calls(), clock, Server([program.service])
        )
        program.add(parts, plan.service)
        port = parts.server.bind(host.host, host.port)
        stack.push_async_callback(parts.server.stop, _LAST_WORDS)
        stack.push_async_callback(parts.calls.aclose)
        await parts.server.start()

        tasks = await stack.enter_async_context(Tasks())
        tasks.start("engine", _watch(engine))
        registration = _register(plan, parts, signer, port)
        if registration is not None:
            stack.callback(registration.close)
            tasks.start("registration", registration.run())
        if shutdown is None:
            shutdown = Shutdown()
            shutdown.on_signals()
        await parts.server.serving(True)
        said.info(
            "serving",
            address=join_address(host.host, port),
            engine_id=engine.info.engine_id,
            role=plan.role,
            model=engine.info.model,
            kvd=handoffs is not None,
        )

        async def drain() -> None:
            await parts.server.serving(False)
            if registration is not None:
                await registration.announce("draining")
            await parts.calls.drain()

        try:
            await serve_until_shutdown(shutdown, tasks.failed(), drain, host.drain_seconds)
        finally:
            if registration is not None:
                await registration.announce("bye")
    said.info("closed")


async def _attach(stack: AsyncExitStack, config: EngineConfig, engine: Engine) -> HandoffHost | None:
    if config.kvd_socket is None:
        return None
    info = engine.info
    handoffs = HandoffHost(str(config.kvd_socket), info.engine_id, info.identity, info.ranks)
    stack.push_async_callback(handoffs.aclose)
    await handoffs.start(config.kvd_seconds)
    return handoffs


def _kvd_address(plan: Plan[Any]) -> str:
    socket = plan.engine.config.kvd_socket
    return "" if socket is None else f"unix:{socket.absolute()}"


def _register(plan: Plan[Any], parts: Parts, signer: Signer, port: int) -> Registration | None:
    host = plan.host
    if not host.proxy:
        return None
    towards, _ = split_address(host.proxy)
    address = join_address(host.advertise_host or advertised_host(host.host, towards), port)
    announcer = Announcer(parts.engine, parts.peers, parts.clock, plan.role, address, host.locator_seconds)
    return Registration(host.proxy, announcer.beat, signer, plan.beats)


async def _watch(engine: Engine) -> None:
    raise EngineDied(await engine.failed())
