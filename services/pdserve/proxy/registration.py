"""The socket at which engines register: ZMQ ROUTER, one frame a beat, an answer to each of ours."""

import asyncio
from collections.abc import Callable

import structlog
import zmq
import zmq.asyncio

from pdserve.proxy.registry import Change, Registry
from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime import beats
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import join_address
from pdserve.runtime.signing import Signer

log = structlog.get_logger(__name__)

Heard = Callable[[beats.Beat, list[Change]], None]
"""Told of each beat that was taken, and of what it changed."""


class Registration:
    """Feeds the registry from the wire."""

    def __init__(self, registry: Registry, signer: Signer, clock: Clock, heard: Heard) -> None:
        self._registry = registry
        self._signer = signer
        self._clock = clock
        self._heard = heard
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A peer that does not read its answers loses them; it never holds the proxy up.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, beats.MAX_FRAME)
        self._socket.setsockopt(zmq.IPV6, 1)

    def bind(self, host: str, port: int) -> int:
        """Binds and returns the port; 0 takes a free one.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        try:
            if port:
                self._socket.bind(f"tcp://{join_address(host, port)}")
                return port
            return self._socket.bind_to_random_port(f"tcp://{join_address(host, 1).rpartition(':')[0]}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind the registration port {join_address(host, port)}: {error}") from error

    async def run(self) -> None:
        """Takes beats until it is cancelled."""
        while True:
            parts = await self._socket.recv_multipart()
            reply = self._take(parts[-1])
            if reply is not None:
                try:
                    await self._socket.send_multipart([parts[0], beats.encode_reply(reply)], flags=zmq.NOBLOCK)
                except zmq.Again:
                    log.debug("registration_answer_dropped", beat=reply.beat)

    def close(self) -> None:
        """Unbinds; safe twice."""
        self._socket.close()
        self._context.term()

    def _take(self, frame: bytes) -> beats.Reply | None:
        """The answer to a frame; None where none is expected."""
        try:
            found = beats.decode(frame, self._signer, self._clock.unix())
        except PdserveError as error:
            log.warning("registration_refused", reason=error.reason, error=error.message)
            return beats.refusal(error)
        now = self._clock.monotonic()
        if isinstance(found, beats.Foreign):
            try:
                self._registry.foreign(found, now)
            except PdserveError as error:
                log.warning("registration_refused", reason=error.reason, error=error.message)
            return None
        try:
            changes = self._registry.beat(found, now)
        except PdserveError as error:
            log.warning("registration_refused", engine_id=found.engine_id, reason=error.reason, error=error.message)
            return beats.refusal(error, found.beat)
        self._heard(found, changes)
        return beats.Reply(ok=True, beat=found.beat)


async def sweep(registry: Registry, clock: Clock, interval: float, changed: Callable[[list[Change]], None]) -> None:
    """Evicts what has missed its beats, every half interval, until it is cancelled."""
    while True:
        await asyncio.sleep(interval / 2)
        changed(registry.expire(clock.monotonic()))
