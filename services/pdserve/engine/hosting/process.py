"""A process that hosts one engine behind gRPC: builds everything in order, closes in reverse.

    engine -> kvd attachment -> server (NOT_SERVING) -> registration -> SERVING
    ... first signal: NOT_SERVING, "draining" to the proxy, open calls end, "bye" ...
    registration <- calls <- server <- kvd attachment <- engine

The engine comes first because vLLM forks, which gRPC does not survive.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import structlog

from pdserve.engine.hosting import factory
from pdserve.engine.hosting.announcing import Announcer
from pdserve.engine.hosting.factory import EngineChoice, EngineConfig
from pdserve.engine.hosting.handoff_host import HandoffHost
from pdserve.engine.hosting.metrics import readings
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.program import Parts, Plan, Program, read
from pdserve.engine.port import Engine
from pdserve.rpc.errors import ConfigError, EngineDied, PdserveError
from pdserve.runtime import log
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import advertised_host, check_bind, join_address, load_cluster_key, split_address
from pdserve.runtime.failpoints import FAILPOINTS
from pdserve.runtime.failpoints.control import from_environment
from pdserve.runtime.lifecycle import Shutdown, Tasks, serve_until_shutdown
from pdserve.runtime.registration import Registration
from pdserve.runtime.server import Server
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry.metrics import Metrics
from pdserve.runtime.telemetry.serve import MetricsServer

S = TypeVar("S")
Build = Callable[[EngineChoice], Awaitable[Engine]]

_LAST_WORDS = 0.5
"""Seconds in which calls that were stopped can still tell their callers why."""

said = structlog.get_logger(__name__)


def main(program: Program[Any], argv: Sequence[str] | None = None) -> int:
    """Runs a command to its end. Returns the process' exit status: 0 after a drain or a stop, 2 for
    settings that cannot work, 1 for any other failure."""
    log.setup(program.name)
    try:
        plan = read(program, sys.argv[1:] if argv is None else argv)
        log.setup(program.name, plan.host.log_format, plan.host.log_level)
        from_environment(FAILPOINTS)
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
    host.metrics.check(key, insecure=host.insecure)
    signer = Signer(key.secret)
    said.info("starting", engine=plan.engine.config.engine.value, role=plan.role)
    async with AsyncExitStack() as stack:
        engine = await (build or factory.build_engine)(plan.engine)
        stack.push_async_callback(engine.aclose)
        handoffs = await _attach(stack, plan.engine.config, engine)
        peers = Peers(engine.info, lambda: _kvd_address(plan.engine.config, handoffs), signer)
        metrics = Metrics(program.name, program.metrics)
        parts = Parts(engine, handoffs, peers, Calls(), clock, Server([program.service]), metrics, plan.role)
        program.add(parts, plan.service)
        port = parts.server.bind(host.host, host.port)
        stack.push_async_callback(parts.server.stop, _LAST_WORDS)
        stack.push_async_callback(parts.calls.aclose)
        await parts.server.start()

        tasks = await stack.enter_async_context(Tasks())
        tasks.start("engine", _watch(engine))
        registration = _register(plan, parts, handoffs, signer, port)
        if registration is not None:
            stack.callback(registration.close)
        metrics.read(lambda: readings(parts, handoffs, registration))
        shown = ""
        if host.metrics.port is not None:
            metrics_server = MetricsServer(metrics)
            stack.push_async_callback(metrics_server.aclose)
            shown = await metrics_server.start(host.metrics)
        if registration is not None:
            tasks.start("registration", registration.run())
        if shutdown is None:
            metrics.with_process()  # it is ours alone
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
            metrics=shown,
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


def _kvd_address(config: EngineConfig, handoffs: HandoffHost | None) -> str:
    """Where other nodes reach the engine's kvd; its socket where it has no peers."""
    if config.kvd_socket is None or handoffs is None:
        return ""
    return handoffs.peer_address or f"unix:{config.kvd_socket.absolute()}"


def _register(
    plan: Plan[Any], parts: Parts, handoffs: HandoffHost | None, signer: Signer, port: int
) -> Registration | None:
    host = plan.host
    if not host.proxy:
        return None
    towards, _ = split_address(host.proxy)
    address = join_address(host.advertise_host or advertised_host(host.host, towards), port)
    announcer = Announcer(
        parts.engine,
        parts.peers,
        parts.clock,
        plan.role,
        address,
        host.locator_seconds,
        lambda: handoffs is not None and handoffs.draining,
    )
    return Registration(host.proxy, announcer.beat, signer, plan.beats)


async def _watch(engine: Engine) -> None:
    raise EngineDied(await engine.failed())
