"""One try of one request: both of its legs, what ties them together, and how they end.

READ   prefill ──ready──▶ decode(ticket) ──tokens──▶        WRITE   decode(locator) ──tokens──▶
          └────────── released                                      prefill(locator) ─ready─ released

- A prefill leg that fails before its offer ends decode at once; after it, kvd tells decode, which
  gets `grace` seconds to end by itself.
- A decode leg that fails, or a client that goes away, ends prefill at once.
- After a good answer the prefill leg is left open until its blocks are released; its task belongs
  to the Owner, and the answer does not wait for it.
"""

import asyncio
import contextlib

import structlog

from pdserve.proxy.admission import Grant
from pdserve.proxy.blame import at_fault
from pdserve.proxy.brief import Brief
from pdserve.proxy.course import Course
from pdserve.proxy.legs import (
    DecodeEvent,
    Done,
    Leg,
    Legs,
    PrefillEvent,
    Ready,
    Released,
    Source,
    Tokens,
)
from pdserve.proxy.moments import Moments, Told
from pdserve.proxy.owner import Owner
from pdserve.proxy.types import Mode
from pdserve.rpc.errors import (
    ConsumerFailed,
    PdserveError,
    PeerLost,
    ProducerFailed,
    RequestCancelled,
    TransferExpired,
    TransferFailed,
)
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

LATE_CAUSE = 0.2
"""Seconds that decode's word on a failed prefill waits for prefill's own."""
LATE_READY = 1.0
"""Seconds that a complete answer waits for the facts of a prefill that has not reported yet (WRITE)."""


class Attempt:
    """Open it, take what comes by `next`, and close it in any case."""

    def __init__(self, brief: Brief, grant: Grant, legs: Legs, owner: Owner, clock: Clock) -> None:
        self._brief = brief
        self._grant = grant
        self._legs = legs
        self._owner = owner
        self._clock = clock
        self._prefill: Leg[PrefillEvent] | None = None
        self._decode: Leg[DecodeEvent] | None = None
        self._offered = asyncio.Event()
        self._prefill_over = asyncio.Event()
        self._cut_off: asyncio.TimerHandle | None = None
        self._ended = False
        self._end_error: PdserveError | None = None
        self.prefill_error: PdserveError | None = None
        self.ready: Ready | None = None
        self.moments = Moments(began_ns=clock.monotonic_ns())
        self._done: Done | None = None

    @property
    def grant(self) -> Grant:
        """The engines, and what is held on them."""
        return self._grant

    @property
    def transfer_id(self) -> bytes:
        """Fresh for each attempt."""
        return self._brief.transfer_id

    async def open(self) -> None:
        """Opens the legs; in READ returns when decode's is open, which is after prefill's offer.

        Raises:
            PdserveError: prefill failed before its offer.
        """
        brief, prefill = self._brief, self._grant.choice.prefill
        await failpoint(Point.PROXY_DISPATCH)
        self._raise_if_closed()
        if prefill is None:
            self._open_decode(None)
        elif brief.mode is Mode.WRITE:
            self._open_decode(Source(brief.transfer_id, brief.mode, peer_locator=prefill.locator))
            self._open_prefill()
        else:
            self._open_prefill()
            await self._offered.wait()  # bounded by the leg's own deadline
            await failpoint(Point.PROXY_BETWEEN)
            self._raise_if_closed()
            if self.prefill_error is not None or self.ready is None:  # perhaps lost again in the same turn
                raise self.prefill_error or ProducerFailed("prefill ended without an offer")
            self._open_decode(Source(brief.transfer_id, brief.mode, ticket=self.ready.ticket))

    async def next(self) -> Tokens | Done:
        """What decode says next.

        Raises:
            PdserveError: why the attempt failed; prefill's reason where that was the cause.
        """
        assert self._decode is not None, "open comes first"
        while True:
            self._raise_if_closed()
            try:
                event = await self._decode.receive()
            except PdserveError as error:
                self.moments.decode_failed_ns = self._clock.monotonic_ns()
                if isinstance(error, TransferFailed):
                    raise await self._cause(error) from None
                raise
            if isinstance(event, Tokens):
                await failpoint(Point.PROXY_TOKEN)
                self.moments.token(event, self._clock.monotonic_ns())
                self._disarm()
                return event
            if isinstance(event, Done):
                self._done = event
                self._disarm()
                return event
            if event is None:
                raise ConsumerFailed("decode ended without finishing its answer")

    async def finish(self) -> None:
        """After Done: lets the decode call end well, and waits a little for a late `ready`."""
        assert self._decode is not None, "open comes first"
        try:
            await self._decode.receive()
        except PdserveError as error:  # the answer is complete all the same
            log.warning(
                "decode_ended_badly",
                request_id=self._brief.request_id,
                transfer_id=self._brief.transfer_id,
                error=error.message,
            )
        self._grant.release_decode()
        if self._prefill is not None and not self._offered.is_set():
            try:
                await asyncio.wait_for(self._offered.wait(), LATE_READY)
            except TimeoutError:
                log.warning("ready_late", request_id=self._brief.request_id, transfer_id=self._brief.transfer_id)

    def close(self, error: PdserveError | None) -> None:
        """Ends the attempt; None after a good answer, which leaves prefill until it is released.
        Does not block; safe twice and at any moment."""
        if self._ended:
            return
        self._ended, self._end_error = True, error
        self.moments.ended_ns = self._clock.monotonic_ns()
        self._disarm()
        if self._decode is not None:
            self._decode.cancel(error or RequestCancelled("the answer is complete"))
        self._grant.release_decode()
        if self._prefill is None:
            self._grant.release_prefill()
        elif error is not None:
            self._prefill.cancel(error)

    def course(self, boot_id: str) -> Course:
        """When it did what; to be asked once it is closed."""
        told = Told(
            ready=self.ready,
            done=self._done,
            prefill_progress=self._prefill.progress if self._prefill is not None else None,
            decode_progress=self._decode.progress if self._decode is not None else None,
        )
        return self.moments.course(told, boot_id)

    def blame(self, error: PdserveError) -> str:
        """The engine that a retry should avoid; empty where neither is at fault."""
        # After the first token what was handed over has been read.
        prefill = None if self.moments.first_token_ns else self._grant.choice.prefill
        return at_fault(error, self.prefill_error, prefill, self._grant.choice.decode)

    def _open_prefill(self) -> None:
        brief, choice = self._brief, self._grant.choice
        assert choice.prefill is not None, "asked for a prefill leg"
        order = brief.prefill_order(choice.decode.locator)
        self.moments.prefill_sent_ns = self._clock.monotonic_ns()
        self._prefill = self._legs.prefill(choice.prefill, order, brief.traceparent, self._left())
        self._owner.start(f"prefill of {brief.request_id}", self._watch_prefill(self._prefill))

    def _open_decode(self, source: Source | None) -> None:
        brief = self._brief
        order = brief.decode_order(source)
        self.moments.decode_sent_ns = self._clock.monotonic_ns()
        self._decode = self._legs.decode(self._grant.choice.decode, order, brief.traceparent, self._left())

    async def _watch_prefill(self, leg: Leg[PrefillEvent]) -> None:
        """From the call to the release of its blocks; ends with the leg, which has a deadline."""
        brief = self._brief
        try:
            event = await leg.receive()
            if not isinstance(event, Ready):
                raise ProducerFailed("prefill ended without an offer")
            came_ns = self._clock.monotonic_ns()
            await failpoint(Point.PROXY_READY)
            self.ready, self.moments.ready_ns = event, came_ns
            self._offered.set()
            async with asyncio.timeout(brief.release_timeout):
                if not isinstance(await leg.receive(), Released):
                    raise ProducerFailed("prefill ended without releasing its blocks")
                await leg.receive()  # the end of the call
        except TimeoutError:
            expired = TransferExpired(f"prefill's blocks were not released within {brief.release_timeout:g} s")
            log.error("release_overdue", request_id=brief.request_id, transfer_id=brief.transfer_id)
            leg.cancel(expired)
            self._prefill_failed(expired)
        except PdserveError as error:
            self._prefill_failed(error)
        finally:
            leg.cancel(RequestCancelled("the proxy let go of this transfer"))
            self._grant.release_prefill()
            self._offered.set()
            self._prefill_over.set()

    def _prefill_failed(self, error: PdserveError) -> None:
        self.prefill_error, self.moments.prefill_failed_ns = error, self._clock.monotonic_ns()
        if self._end_error is not None:
            return  # given up before, by us
        log.info(
            "prefill_failed",
            request_id=self._brief.request_id,
            transfer_id=self._brief.transfer_id,
            offered=self.ready is not None,
            reason=error.reason,
            error=error.message,
        )
        if self._decode is None or self.moments.first_token_ns or self._ended:
            return
        if self.ready is None:
            self._decode.cancel(error)
        else:
            self._cut_off = asyncio.get_running_loop().call_later(self._brief.grace, self._decode.cancel, error)

    async def _cause(self, error: TransferFailed) -> PdserveError:
        """Why decode's hand-over failed: what prefill's own leg says, unless that only echoes decode's. Where decode
        says that prefill is at fault, kvd's word may have come sooner than prefill's own."""
        if isinstance(error, PeerLost | ProducerFailed) and self._prefill is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATE_CAUSE):
                    await self._prefill_over.wait()
        cause = self.prefill_error
        return error if cause is None or isinstance(cause, TransferFailed) else cause

    def _raise_if_closed(self) -> None:
        if self._end_error is not None:
            raise self._end_error

    def _disarm(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
            self._cut_off = None

    def _left(self) -> float:
        # A deadline that has passed still makes a call, which then fails with the right error.
        return max(self._brief.deadline - self._clock.monotonic(), 0.001)
