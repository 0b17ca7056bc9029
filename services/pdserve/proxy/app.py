"""Builds the proxy out of its parts, tells each what concerns it, and closes them in reverse."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import structlog

from pdserve.api.serving.v1 import serving_pb2_grpc
from pdserve.proxy import ended
from pdserve.proxy.admission import Admission
from pdserve.proxy.channels import Channels
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.credits import Ledger
from pdserve.proxy.drive import Driver, DriveSettings
from pdserve.proxy.grpc_legs import GrpcLegs
from pdserve.proxy.http.server import HttpServer
from pdserve.proxy.inference import Inference
from pdserve.proxy.metrics import RequestCounts, readings
from pdserve.proxy.owner import Owner
from pdserve.proxy.readiness import Readiness
from pdserve.proxy.registration import Registration, sweep
from pdserve.proxy.registry import Change, Joined, Registry
from pdserve.proxy.service import SERVICE, InferenceService
from pdserve.proxy.tokenizing.shelf import Shelf
from pdserve.proxy.trace import RandomBytes
from pdserve.proxy.tracing.verdict import kept
from pdserve.runtime.beats import Beat
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import join_address
from pdserve.runtime.lifecycle import Tasks
from pdserve.runtime.server import Server
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import catalogue, names
from pdserve.runtime.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

ANSWER_GRACE = 1.0
"""Seconds that requests which are ended get to take their error."""
CANCEL_GRACE = 1.0
"""Seconds that open calls get to hear that they are cancelled."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the proxy listens, as `host:port`."""

    grpc: str
    http: str
    registration: str


class Fleet:
    """Passes on what happens to engines: to the registry, the ledger, the channels, the queue."""

    def __init__(
        self, registry: Registry, ledger: Ledger, admission: Admission, shelf: Shelf, then: Callable[[], None]
    ) -> None:
        """`then` is told last; it does not block."""
        self._then = then
        self._registry = registry
        self._ledger = ledger
        self._admission = admission
        self._shelf = shelf
        self.channels = Channels(self._up, self._broken)

    def heard(self, beat: Beat, changes: list[Change]) -> None:
        """A beat was taken."""
        self._apply(changes)
        self._ledger.reported(beat.engine_id, beat.free_kv_tokens)
        self._pass_on()

    def changed(self, changes: list[Change]) -> None:
        """Something happened without a beat, or only time has passed: the registry may have settled."""
        self._apply(changes)
        self._pass_on()

    def _pass_on(self) -> None:
        self._admission.pump()
        self._then()

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Joined):
                card = change.card
                log.info(
                    "engine_joined",
                    engine_id=card.engine_id,
                    role=card.role.value,
                    model=card.model,
                    address=card.address,
                    total_kv_tokens=card.total_kv_tokens,
                )
                self._ledger.joined(card)
                self._shelf.announce(card.model, card.tokenizer)
                self.channels.join(card)
            else:
                log.warning("engine_left", engine_id=change.engine_id, why=change.reason, graceful=change.graceful)
                self._ledger.left(change.engine_id)
                self.channels.leave(change.engine_id, graceful=change.graceful)

    def _up(self, engine_id: str) -> None:
        self._registry.channel_ready(engine_id)
        self._pass_on()

    def _broken(self, engine_id: str, reason: str) -> None:
        self.changed(self._registry.channel_broken(engine_id, reason))


class ProxyApp:
    """A running proxy; `start` makes one, `aclose` ends it."""

    def __init__(
        self,
        addresses: Addresses,
        inference: Inference,
        admission: Admission,
        driver: Driver,
        owner: Owner,
        ledger: Ledger,
        registry: Registry,
        readiness: Readiness,
        tasks: Tasks,
        closing: contextlib.AsyncExitStack,
    ) -> None:
        self.addresses = addresses
        self.inference = inference
        self.ledger = ledger
        self.registry = registry
        self._admission = admission
        self._driver = driver
        self._owner = owner
        self._readiness = readiness
        self._tasks = tasks
        self._closing = closing

    @classmethod
    async def start(
        cls,
        config: ProxyConfig,
        signer: Signer,
        clock: Clock,
        random: RandomBytes,
        traces: ended.Sink | None = None,
        metrics: Metrics | None = None,
    ) -> "ProxyApp":
        """Builds, binds and serves. `traces`: takes the records of the requests that are traced; None: none are.
        `metrics`: what GET /metrics shows, of catalogue.PROXY; None: its own.

        Raises:
            ConfigError: a port cannot be bound.
        """
        async with contextlib.AsyncExitStack() as stack:
            registry = Registry(
                config.beat_interval, config.beats_missed, config.beats_stalled, settle=config.beats_settle
            )
            ledger = Ledger()
            admission = Admission(
                registry,
                ledger,
                clock.monotonic,
                length=config.admission_queue,
                timeout=config.admission_timeout,
                hold_length=config.hold_queue,
                hold_timeout=config.hold_timeout,
            )
            shelf = Shelf(config.tokenizer_folders(), changed=lambda: readiness.changed())
            stack.callback(shelf.close)
            fleet = Fleet(registry, ledger, admission, shelf, lambda: readiness.changed())
            stack.push_async_callback(fleet.channels.aclose)
            registration = Registration(registry, signer, clock, fleet.heard)
            stack.callback(registration.close)
            tasks = await stack.enter_async_context(Tasks())
            owner = Owner()
            stack.push_async_callback(owner.aclose)
            settings = DriveSettings(
                headroom=config.admission_headroom,
                retries=config.retries,
                continuations=config.continuations,
                recomputes=config.recomputes,
                grace=config.handover_grace,
                release_timeout=config.release_timeout,
            )
            metrics = metrics or Metrics(names.PROXY, catalogue.PROXY)
            counts = RequestCounts(metrics.tally)
            sinks: list[ended.Sink] = [ended.to_log, counts.ended]
            if traces is not None:
                sinks.append(kept(traces, config.trace_slow))
            legs, sink = GrpcLegs(fleet.channels), ended.all_of(*sinks)
            driver = Driver(admission, legs, owner, clock, random, settings, sink, counts.gap)
            inference = Inference(config, registry, admission, shelf, driver, clock, random, counts.refused)
            metrics.read(lambda: readings(inference, ledger))

            server = Server([SERVICE])
            serving_pb2_grpc.add_InferenceServicer_to_server(InferenceService(inference), server.grpc)
            readiness = Readiness(inference.placeable, server.serving)
            grpc_port = server.bind(config.host, config.grpc_port)
            stack.push_async_callback(server.stop, CANCEL_GRACE)
            await server.start()
            http = HttpServer(inference, metrics, config.max_body)
            stack.push_async_callback(http.aclose)
            http_port = await http.start(config.host, config.http_port)
            ping_port = registration.bind(config.host, config.ping_port)
            tasks.start("registration", registration.run())
            tasks.start("sweep", sweep(registry, clock, config.beat_interval, fleet.changed))
            tasks.start("readiness", readiness.run())

            addresses = Addresses(
                join_address(config.host, grpc_port),
                join_address(config.host, http_port),
                join_address(config.host, ping_port),
            )
            closing = stack.pop_all()
            return cls(addresses, inference, admission, driver, owner, ledger, registry, readiness, tasks, closing)

    async def failed(self) -> NoReturn:
        """Waits for a background task to die and raises why."""
        await self._tasks.failed()

    async def drain(self) -> None:
        """Takes nothing new and waits for what there is; the caller bounds the wait."""
        self._admission.close()
        await self._readiness.update()
        await self._driver.idle()
        await self._owner.idle()

    async def aclose(self) -> None:
        """Ends everything, open requests with DRAINING; safe twice."""
        self._driver.stop("this proxy has stopped; try another")
        try:
            await asyncio.wait_for(self._driver.idle(), ANSWER_GRACE)
        except TimeoutError:
            log.warning("requests_left", running=self._driver.running)
        await self._closing.aclose()
