"""`Handoffs` over kvd: the gRPC service beside an engine hears how each transfer ended, gives
transfers up, and says that it still has the requests which it watches."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import structlog

from pdserve.kvd.client.aio import AsyncAttachment
from pdserve.kvd.client.config import AttachConfig
from pdserve.kvd.client.messages import Cancel, End, Hello, Outcome, Participant, Renew, Welcome
from pdserve.rpc.errors import DeadlinePassed, KvdUnavailable, PdserveError, TransferUsed
from pdserve.runtime.telemetry.tally import known_reason

log = structlog.get_logger(__name__)

LEFT = "left"
"""What an end that nobody waited for counts as."""
_SOONEST_S = 0.01
_Key = tuple[bytes, int | None]


class Watch:
    """One end of one transfer, from before the engine hears of it; use as a context manager."""

    def __init__(self, host: "HandoffHost", transfer_id: bytes, consumer: int | None) -> None:
        self.transfer_id = transfer_id
        self.consumer = consumer
        """None: the producer's end."""
        self._host = host
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    @property
    def result(self) -> End | None:
        """The end, where it has come."""
        return self._end.result() if self._end.done() else None

    async def end(self, timeout: float) -> End:
        """Waits for the end, at most `timeout` seconds; again and by several callers if they like.

        Raises:
            DeadlinePassed: it did not come in time.
        """
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._end)
        except TimeoutError:
            raise DeadlinePassed(f"the hand-over did not end within {timeout:g} s") from None

    def close(self) -> None:
        """Stops watching (and renewing). Safe twice; cancels nothing."""
        self._host.forget(self)

    def deliver(self, end: End) -> bool:
        """For the host: the end has come; whether it is the first, which counts."""
        if self._end.done():
            return False
        self._end.set_result(end)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class HandoffHost:
    """Attaches as the engine's host. Everything is called on the loop that ran `start`."""

    def __init__(
        self,
        socket: str,
        engine_id: str,
        identity: Mapping[str, str],
        ranks: int = 1,
        config: AttachConfig | None = None,
    ) -> None:
        """`socket` is the path of kvd's gRPC socket."""
        hello = Hello(engine_id=engine_id, participant=Participant.HOST, identity=identity, ranks=ranks)
        self._attachment = AsyncAttachment(socket, hello, on_end=self._ended, on_lost=self._lost, config=config)
        self._watches: dict[_Key, Watch] = {}
        self._renewer: asyncio.Task[None] | None = None
        self.ended: Counter[tuple[str, str, str]] = Counter()
        """How the ends that were watched ended: (producer or consumer, outcome or "left", reason)."""

    async def start(self, timeout: float = 10.0) -> Welcome:
        """Attaches and starts to renew leases.

        Raises:
            KvdUnavailable: no kvd within `timeout` seconds.
            PdserveError: kvd refused the hello; its own class.
        """
        welcome = await self._attachment.start(timeout)
        self._renewer = asyncio.create_task(self._renew(), name="renew-leases")
        self._renewer.add_done_callback(self._renewer_ended)
        return welcome

    @property
    def attached(self) -> bool:
        """Whether kvd is there now."""
        return self._attachment.attached

    @property
    def renew_s(self) -> float:
        """Seconds between renewals, as kvd has said, or a third of its lease where it has not; 0 before `start`."""
        welcome = self._attachment.welcome
        return (welcome.renew_s or welcome.lease_s / 3) if welcome is not None else 0.0

    @property
    def peer_address(self) -> str:
        """HOST:PORT at which other nodes reach kvd, as it has said last; empty where it has no peers."""
        welcome = self._attachment.welcome
        return welcome.peer_address if welcome is not None else ""

    @property
    def draining(self) -> bool:
        """Whether kvd has said that it takes no new transfers."""
        welcome = self._attachment.welcome
        return self._attachment.usable and welcome is not None and welcome.draining

    @property
    def watching(self) -> int:
        """Watches that are open."""
        return len(self._watches)

    def register(self, transfer_id: bytes, consumer: int | None = None) -> Watch:
        """Watches the producer's end (None) or that of consumer 0, 1, ...; before the engine is
        asked, so that no end is missed. It is renewed until its end or `close`.

        Raises:
            TransferUsed: this end is being watched already.
            KvdUnavailable: kvd is away, takes no new transfer of this producer's, or hears no renewals from here any
                more; a hand-over cannot succeed now.
        """
        key = (transfer_id, consumer)
        if key in self._watches:
            raise TransferUsed(f"transfer {transfer_id.hex()} is in use by another request")
        if not self._attachment.usable:
            raise KvdUnavailable("this node's kvd cannot be reached")
        if consumer is None and self.draining:  # of a consumer's transfer kvd may have the other end, and knows better
            raise KvdUnavailable("this node's kvd drains and takes no new transfers")
        if self._renewer is not None and self._renewer.done():
            raise KvdUnavailable("this service has failed to renew leases")
        watch = self._watches[key] = Watch(self, transfer_id, consumer)
        return watch

    def cancel(self, transfer_id: bytes, reason: str) -> None:
        """Gives a transfer up; all its ends follow. `reason`: of pdserve.rpc.errors. Also for one
        that kvd has not heard of yet: it is remembered."""
        self._attachment.send(Cancel(transfer_id, reason))

    def forget(self, watch: Watch) -> None:
        """See Watch.close."""
        key = (watch.transfer_id, watch.consumer)
        if self._watches.get(key) is watch:
            del self._watches[key]
            if watch.result is None:
                self._count(watch, LEFT, "")

    async def aclose(self) -> None:
        """Detaches; open watches end with KVD_UNAVAILABLE. Safe twice."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            renewer.cancel()
            await asyncio.gather(renewer, return_exceptions=True)
        await self._attachment.aclose()
        self._lost(KvdUnavailable("the service has closed"))

    def _ended(self, end: End) -> None:
        watch = self._watches.get((end.transfer_id, None if end.producer else end.consumer))
        if watch is not None:
            self._deliver(watch, end)

    def _lost(self, error: PdserveError) -> None:
        for watch in list(self._watches.values()):
            end = End(
                handle="",
                transfer_id=watch.transfer_id,
                outcome=Outcome.FAILED,
                reason=error.reason,
                detail=error.message,
                producer=watch.consumer is None,
                consumer=watch.consumer or 0,
            )
            self._deliver(watch, end)

    def _deliver(self, watch: Watch, end: End) -> None:
        if watch.deliver(end):
            self._count(watch, end.outcome.value, end.reason)

    def _count(self, watch: Watch, outcome: str, reason: str) -> None:
        # A reason that somebody made up must not grow the table.
        self.ended["producer" if watch.consumer is None else "consumer", outcome, known_reason(reason)] += 1

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(max(self.renew_s, _SOONEST_S))
            live = tuple({w.transfer_id: None for w in self._watches.values() if w.result is None})
            if live:
                self._attachment.send(Renew(live))

    def _renewer_ended(self, renewer: asyncio.Task[None]) -> None:
        """A defect: what is watched would run out unsaid, so it ends now."""
        if not renewer.cancelled() and (error := renewer.exception()) is not None:
            log.error("renewing_failed", exc_info=error, watching=len(self._watches))
            self._lost(PdserveError(f"renewing leases failed: {type(error).__name__}: {error}"))
