"""One participant's Attach stream on an asyncio loop: sends, receives, comes back after a loss."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import grpc
import structlog

from pdserve.api.kvd.v1 import kvd_pb2_grpc
from pdserve.kvd.client.config import AttachConfig
from pdserve.kvd.client.ledger import Ledger
from pdserve.kvd.client.messages import (
    Cancel,
    End,
    Fenced,
    Hello,
    Participant,
    Renew,
    Request,
    Retract,
    Welcome,
)
from pdserve.kvd.client.stream import OPTIONS, Call, Outbox, greet, over, read
from pdserve.rpc.errors import (
    ConfigError,
    IncompatibleEngines,
    InvalidRequest,
    KvdUnavailable,
    PdserveError,
    TicketRefused,
    Unauthenticated,
)
from pdserve.rpc.status import to_error

log = structlog.get_logger(__name__)

_REFUSALS = (InvalidRequest, Unauthenticated, TicketRefused, IncompatibleEngines, ConfigError)
"""Errors that another attempt with the same hello would meet again."""

_MOST_KEPT = 4096
"""Messages kept for a kvd that has been given up."""

Welcomed = Callable[[Welcome, bool], Awaitable[None]]
"""Called for each welcome before anything else is sent; True: a kvd that has not seen us yet."""


class AsyncAttachment:
    """Call everything on the loop that ran `start`.

    Contract: every handle that was sent in a begin, offer or accept gets exactly one end, be it
    kvd's or, once kvd is gone for good, a local one with KVD_UNAVAILABLE.
    """

    def __init__(
        self,
        socket: str,
        hello: Hello,
        *,
        on_end: Callable[[End], None] | None = None,
        on_welcome: Welcomed | None = None,
        on_lost: Callable[[PdserveError], None] | None = None,
        config: AttachConfig | None = None,
    ) -> None:
        """`socket` is the path of kvd's gRPC socket. With `on_end`, ends are given to it and not
        kept for `drain_ends`; a scheduler then calls `forget`. `on_lost` hears once each time kvd
        is given up."""
        self._target = f"unix:{socket}"
        self._hello = hello
        self._config = config or AttachConfig()
        self._on_end = on_end
        self._on_welcome = on_welcome
        self._on_lost = on_lost
        self._ledger = Ledger(strict=hello.participant is Participant.SCHEDULER)
        self._outbox = Outbox()
        self._ends: deque[End] = deque()
        self._fences: dict[tuple[str, int], asyncio.Event] = {}
        self.ends_available = asyncio.Event()
        self._attached = asyncio.Event()
        self._welcome: Welcome | None = None
        self._lost: PdserveError | None = None
        self._refused: PdserveError | None = None
        self._closing = False
        self._give_up: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def welcome(self) -> Welcome | None:
        """The last welcome; None before the first."""
        return self._welcome

    @property
    def attached(self) -> bool:
        """Whether the stream stands now."""
        return self._attached.is_set()

    @property
    def usable(self) -> bool:
        """Whether kvd is there or may yet come back to what is open."""
        return self._welcome is not None and self._lost is None

    @property
    def open_handles(self) -> int:
        """Handles that wait for their end."""
        return self._ledger.open

    async def start(self, timeout: float) -> Welcome:
        """Attaches.

        Raises:
            KvdUnavailable: no kvd within `timeout` seconds.
            PdserveError: kvd refused the hello or what `on_welcome` sent; its own class.
        """
        self._arm()
        self._task = asyncio.create_task(self._run(), name=f"attach-{self._hello.participant.value}")
        attached = asyncio.create_task(self._attached.wait())
        try:
            await asyncio.wait({attached, self._task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            attached.cancel()
        if self._welcome is None:
            error = self._refused
            await self.aclose()
            raise error or KvdUnavailable(f"kvd at {self._target} did not answer within {timeout:g} s")
        return self._welcome

    def send(self, message: Request) -> None:
        """Sends in order; never blocks, never raises."""
        if not self._ledger.sending(message):
            return
        if self._lost is None:
            self._outbox.put((message,))
            return
        self._abandon(self._lost)
        if isinstance(message, Cancel | Retract) and len(self._outbox) < _MOST_KEPT:
            self._outbox.put((message,))

    def drain_ends(self) -> list[End]:
        """The ends since the last call."""
        self.ends_available.clear()
        ends = list(self._ends)
        self._ends.clear()
        self.forget([end.handle for end in ends])
        return ends

    def forget(self, handles: Iterable[str]) -> None:
        """Says that these ends, given to `on_end`, have reached whoever calls `send`."""
        self._ledger.drained(handles)

    async def wait_fenced(self, handle: str, attempt: int, timeout: float) -> bool:
        """Whether kvd has fenced the attempt, or is gone; False after `timeout` seconds."""
        if self._lost is not None:
            return True
        event = self._fences.setdefault((handle, attempt), asyncio.Event())
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            self._fences.pop((handle, attempt), None)
        return True

    async def aclose(self) -> None:
        """Ends the stream; handles that are still open end with KVD_UNAVAILABLE. Safe twice."""
        task, self._task = self._task, None
        self._closing = True
        if task is not None:
            task.cancel()
            # A failure of the task was logged where it happened.
            await asyncio.gather(task, return_exceptions=True)
        self._lose(KvdUnavailable("the attachment was closed"))

    async def _run(self) -> None:
        try:
            await self._keep_attached()
        except Exception as error:
            log.exception("kvd.client_failed", **self._names())
            self._attached.clear()
            self._lose(PdserveError(f"the kvd client failed: {type(error).__name__}: {error}"))
            raise

    async def _keep_attached(self) -> None:
        pause = self._config.backoff_first
        while True:
            error: Exception = KvdUnavailable("kvd ended the stream")
            try:
                await self._stream()
            except grpc.aio.AioRpcError as failure:
                error = to_error(failure)
            except (PdserveError, OSError) as failure:
                error = failure
            if self._attached.is_set():
                self._attached.clear()
                pause = self._config.backoff_first
                self._arm()
            if isinstance(error, _REFUSALS):
                log.error("kvd.refused", reason=error.reason, error=error.message, **self._names())
                self._refused = error
                self._lose(error)
                return
            log.info("kvd.stream_lost", error=str(error), **self._names())
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._config.backoff_most)

    async def _stream(self) -> None:
        """One stream's life; returns or raises when it is over: as kvd ends it, or by the first defect of ours."""
        async with grpc.aio.insecure_channel(self._target, options=OPTIONS) as channel:
            call: Call = kvd_pb2_grpc.KvdStub(channel).Attach()
            parts: list[asyncio.Task[None]] = []
            try:
                welcome = await greet(call, self._hello, self._config.welcome_timeout)
                await self._welcomed(welcome)
                works = (self._hear(call), self._outbox.write(call, self._unsendable), self._say_again(welcome.lease_s))
                parts.extend(asyncio.create_task(work) for work in works)
                await over(*parts)
            finally:
                call.cancel()
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)  # what ended the stream has been raised

    async def _hear(self, call: Call) -> None:
        while (message := await read(call)) is not None:
            if isinstance(message, End):
                self._end(message)
            elif isinstance(message, Fenced):
                self._fenced(message)
            else:
                self._welcome = message  # of the same kvd, which drains, or does so no longer

    async def _say_again(self, seconds: float) -> None:
        """Says again what has been open for one to two leases: kvd passes over what it has heard, and
        tells an end again. So neither a lost word nor a lost end holds blocks for ever."""
        while True:
            await asyncio.sleep(seconds)
            again = [message for message in self._ledger.overdue() if message not in self._outbox]
            if again:
                log.info("kvd.said_again", messages=len(again), **self._names())
                self._outbox.put(again)

    def _unsendable(self, message: Request, error: Exception) -> None:
        log.error("kvd.unsendable", kind=type(message).__name__, error=str(error), **self._names())
        if not isinstance(message, Cancel | Renew):
            refused = InvalidRequest(f"{type(message).__name__} cannot be sent: {error}")
            self._deliver_all(self._ledger.refuse(message.handle, refused))

    async def _welcomed(self, welcome: Welcome) -> None:
        fresh = self._welcome is None or self._welcome.kvd_epoch != welcome.kvd_epoch
        if fresh and self._welcome is not None:
            self._lose(KvdUnavailable("kvd was restarted"))
        if self._on_welcome is not None:
            await self._on_welcome(welcome, fresh)
        self._disarm()
        self._welcome = welcome
        if self._lost is None and not fresh:
            # What the lost stream carried may not have arrived. All that was said of open handles
            # is said again, in order: kvd passes over what it has heard.
            self._outbox.begin_again(self._ledger.again())
        self._lost = None
        self._attached.set()
        log.info("kvd.attached", kvd_epoch=welcome.kvd_epoch, fresh=fresh, **self._names())

    def _end(self, end: End) -> None:
        if self._ledger.ended(end):
            self._deliver(end)

    def _deliver(self, end: End) -> None:
        if self._on_end is not None:
            self._on_end(end)
        else:
            self._ends.append(end)
            self.ends_available.set()

    def _deliver_all(self, ends: list[End]) -> None:
        for end in ends:
            self._deliver(end)

    def _fenced(self, fenced: Fenced) -> None:
        if released := self._ledger.fenced(fenced):
            self._outbox.put(released)
        if self._hello.participant is Participant.WORKER:
            self._fences.setdefault((fenced.handle, fenced.attempt), asyncio.Event()).set()

    def _arm(self) -> None:
        if self._give_up is None and self._lost is None:
            deadline = self._config.reconnect_deadline
            error = KvdUnavailable(f"kvd at {self._target} was away for {deadline:g} s")
            self._give_up = asyncio.get_running_loop().call_later(deadline, self._lose, error)

    def _disarm(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def _lose(self, error: PdserveError) -> None:
        """Gives kvd up for now: what is open ends, what waits for a fence may go on."""
        self._disarm()
        already = self._lost is not None
        self._lost = error
        # A new kvd knows none of the handles; it is still told of what is given up.
        self._outbox.begin_again()
        for event in self._fences.values():
            event.set()
        self._abandon(error)
        if not already:
            if self._closing:
                return
            log.warning("kvd.lost", reason=error.reason, error=error.message, **self._names())
            if self._on_lost is not None:
                self._on_lost(error)

    def _abandon(self, error: PdserveError) -> None:
        """Ends what is open. Once kvd is there it hears of that: the peer, and those of this engine that have
        met a new kvd before, would else wait for what was given up here."""
        ends = self._ledger.abandon(error)
        room = 0 if self._closing else max(0, _MOST_KEPT - len(self._outbox))
        self._outbox.put(Cancel(end.transfer_id, error.reason) for end in ends[:room])
        self._deliver_all(ends)

    def _names(self) -> dict[str, object]:
        hello = self._hello
        return {"engine_id": hello.engine_id, "participant": hello.participant.value, "rank": hello.rank}
