"""Tells the proxy about this service's engine every second, over ZMQ; see beats.py for the wire.

A proxy that is away, late or restarted is met again by itself: every beat says everything, and none
is queued for a proxy that is not there. A proxy that refuses the *first* beat ends the process: it
would serve nobody.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from pdserve.rpc.errors import ConfigError, InvalidRequest, from_reason
from pdserve.runtime import beats
from pdserve.runtime.beats import Beat, Reply, State
from pdserve.runtime.failpoints import Point, passing
from pdserve.runtime.signing import Signer

log = structlog.get_logger(__name__)

Snapshot = Callable[[State, int], Beat]
"""Makes the beat with this state and sequence number, from what is true now."""

_QUEUED = 2
_LINGER_MS = 500
_ANNOUNCE_S = 0.25
"""Longest wait for room: the beats before it may still be on their way out of a busy process."""


@dataclass(frozen=True, slots=True)
class RegistrationConfig:
    """How often a service tells the proxy that it is there."""

    beat_seconds: float = 1.0
    """Seconds between two beats."""
    silent_beats: int = 3
    """Beats without an answer after which the log says that the proxy is silent."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if self.beat_seconds <= 0 or self.silent_beats < 1:
            raise ValueError("beat_seconds must be above 0 and silent_beats at least 1")


class Registration:
    """The service's side of one registration. `run` beats until it is cancelled."""

    def __init__(self, proxy: str, snapshot: Snapshot, signer: Signer, config: RegistrationConfig) -> None:
        """`proxy`: `host:port` of its ROUTER socket, or a ZMQ endpoint.

        Raises:
            ConfigError: it is neither.
        """
        self._endpoint = proxy if "://" in proxy else f"tcp://{proxy}"
        self._snapshot = snapshot
        self._signer = signer
        self._config = config
        self._state: State = "ready"
        self._sequence = 0
        self._unanswered = 0
        self._refused = ""
        self.registered = asyncio.Event()
        """Set once the proxy has taken a beat."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, beats.MAX_FRAME)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # an old beat for a proxy that comes back would be a lie
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)  # a proxy whose host vanished leaves no FIN
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--proxy {proxy}: {error}") from error

    @property
    def unanswered(self) -> int:
        """Beats since the proxy's last answer, the one that may be on its way too."""
        return self._unanswered

    async def run(self) -> None:
        """Beats and reads answers until it is cancelled.

        Raises:
            PdserveError: the proxy refused this engine before it ever took it: what it answered.
        """
        loop = asyncio.get_running_loop()
        answer = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            while True:
                due = loop.time() + self._config.beat_seconds
                await self._beat(self._config.beat_seconds)
                # Not cancelled when the next beat is due: it may have taken an answer in that moment.
                while (await asyncio.wait({answer}, timeout=max(due - loop.time(), 0.0)))[0]:
                    self._answered(answer.result()[-1])
                    answer = asyncio.ensure_future(self._socket.recv_multipart())
                    if loop.time() >= due:
                        break
        finally:
            answer.cancel()

    async def announce(self, state: State) -> None:
        """Tells the proxy, as soon as there is room and for at most 0.25 s: a proxy that is away hears nothing. Every
        later beat says the same."""
        self._state = state
        await self._beat(_ANNOUNCE_S)

    def close(self) -> None:
        """Closes the socket; what was announced last still goes out, for at most 0.5 s. Safe twice."""
        self._socket.close()
        self._context.term()

    async def _beat(self, patience: float) -> None:
        """Sends one beat as soon as the proxy is there, or none in `patience` seconds."""
        writable = self._socket.poll(int(patience * 1000), zmq.POLLOUT)  # type: ignore[call-arg]  # pyzmq's stub has no flags
        if await writable:
            self._sequence += 1
            frame = beats.encode(self._snapshot(self._state, self._sequence), self._signer)
            with contextlib.suppress(zmq.Again):  # gone since: the silence below says so
                for arriving in await passing(Point.BEAT, frame):
                    await self._socket.send(arriving, zmq.NOBLOCK)
        self._unanswered += 1
        if self._unanswered == self._config.silent_beats + 1:
            log.warning("proxy_silent", proxy=self._endpoint, beats=self._config.silent_beats)

    def _answered(self, frame: bytes) -> None:
        try:
            reply = beats.decode_reply(frame)
        except InvalidRequest as error:
            log.warning("proxy_answer_unreadable", proxy=self._endpoint, error=error.message)
            return
        if self._unanswered > self._config.silent_beats:
            log.info("proxy_answers_again", proxy=self._endpoint)
        self._unanswered = 0
        if reply.ok:
            self._taken()
        else:
            self._refuse(reply)

    def _taken(self) -> None:
        if not self.registered.is_set() or self._refused:
            log.info("registered", proxy=self._endpoint)
        self._refused = ""
        self.registered.set()

    def _refuse(self, reply: Reply) -> None:
        if reply.detail != self._refused:  # once, not every second
            log.error("registration_refused", proxy=self._endpoint, reason=reply.reason, detail=reply.detail)
        self._refused = reply.detail
        error = from_reason(reply.reason, f"the proxy at {self._endpoint} refused this engine: {reply.detail}")
        if not self.registered.is_set() and not error.retryable:
            raise error
