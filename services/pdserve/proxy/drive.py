"""A request's life after admission control has its needs: grant, attempt, retry, answer.

When an attempt fails before the first token has reached the client, and its error says that another
try may succeed: first other engines with a fresh transfer, then the prompt computed at decode (under
a cap on concurrent ones), then the error. The policy `fail` ends a request at its first failed
hand-over; engines that cannot be reached are replaced all the same.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import structlog

from pdserve.proxy import parts
from pdserve.proxy.admission import Admission, Claim, Grant
from pdserve.proxy.attempt import Attempt, Brief
from pdserve.proxy.legs import Done, Legs
from pdserve.proxy.owner import Owner
from pdserve.proxy.parts import Point
from pdserve.proxy.routing import Need
from pdserve.proxy.trace import RandomBytes, TraceContext
from pdserve.proxy.types import Event, Finished, Mode, OnFailure, Route, Sampling, Stamps, Started, Usage
from pdserve.rpc.errors import (
    DeadlinePassed,
    IncompatibleEngines,
    KvdUnavailable,
    NoEngines,
    PdserveError,
    RequestCancelled,
    TicketRefused,
    TransferFailed,
)
from pdserve.runtime.clock import Clock, boot_id

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Job:
    """A validated request. `cancel` ends it from anywhere."""

    request_id: str
    trace: TraceContext
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    """`max_tokens` is set."""
    mode: Mode
    route: Route
    on_failure: OnFailure
    deadline: float
    """Monotonic seconds."""
    points: dict[int, int]
    """Nanoseconds by Point."""
    attempt: Attempt | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for the answer: both legs end now. Harmless after the end."""
        self.cancelled = True
        if self.attempt is not None:
            self.attempt.close(RequestCancelled("the client went away"))


@dataclass(slots=True)
class _History:
    """What has been tried so far."""

    fallbacks: int = 0
    exclude: frozenset[str] = frozenset()
    """Engines that failed it: no hand-over with them again."""
    unable: frozenset[str] = frozenset()
    """Those of them that cannot compute it alone either."""
    recomputing: bool = False
    error: PdserveError | None = None
    permit: asyncio.Semaphore | None = field(default=None)
    """Held while a prompt is computed again."""

    def let_go(self) -> None:
        if self.permit is not None:
            self.permit.release()
            self.permit = None


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """The driver's share of the configuration; see ProxyConfig."""

    headroom: int = 256
    retries: int = 2
    recomputes: int = 4
    grace: float = 2.0
    release_timeout: float = 60.0


class Driver:
    """Runs jobs."""

    def __init__(
        self,
        admission: Admission,
        legs: Legs,
        owner: Owner,
        clock: Clock,
        random: RandomBytes,
        settings: DriveSettings,
    ) -> None:
        self._admission = admission
        self._legs = legs
        self._owner = owner
        self._clock = clock
        self._random = random
        self._settings = settings
        self._boot_id = boot_id()
        self._recomputes = asyncio.Semaphore(settings.recomputes)
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Jobs that have not ended, waiting ones too."""
        return self._running

    async def idle(self) -> None:
        """Waits until no job runs; the caller bounds the wait."""
        await self._idle.wait()

    async def run(self, job: Job) -> AsyncGenerator[Event, None]:
        """Started, deltas, Finished; closing the generator early ends both legs.

        Raises:
            PdserveError: the request failed; nothing is held afterwards.
        """
        history = _History()
        self._running += 1
        self._idle.clear()
        try:
            while True:
                grant = await self._grant(job, history)
                attempt = self._attempt(job, grant)
                delivered = False
                try:
                    if not history.fallbacks:
                        mode = job.mode if grant.choice.prefill else None
                        yield Started(job.request_id, job.trace.trace_id, job.model, mode)
                    self._dispatched(job, history)
                    await attempt.open()
                    event = await attempt.next()
                    while not isinstance(event, Done):
                        if not delivered:
                            self._first_token(job, attempt, event.stamps or Stamps())
                        yield event.delta
                        if not delivered:
                            # The face asks for more once it has written the first.
                            job.points[Point.FIRST_BYTE_WRITTEN] = self._clock.monotonic_ns()
                            delivered = True
                            history.let_go()
                        event = await attempt.next()
                    await attempt.finish()
                    attempt.close(None)
                    yield self._finished(job, history, attempt, event)
                    return
                except PdserveError as error:
                    attempt.close(error)
                    if delivered or job.cancelled:
                        raise
                    self._note_failure(job, history, attempt, error)
                except BaseException:
                    attempt.close(RequestCancelled("the client went away"))
                    raise
        finally:
            history.let_go()
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _grant(self, job: Job, history: _History) -> Grant:
        """The engines of the next attempt; raises the last failure where there are none left."""
        need = Need(len(job.prompt), job.sampling.max_tokens or 1, job.sampling.n, self._settings.headroom)
        claim = Claim(job.model, need, job.route, history.exclude)
        failure = history.error
        if failure is None:
            grant = await self._admission.admit(claim, job.deadline)
            job.points[Point.ADMITTED] = self._clock.monotonic_ns()
            return grant
        if history.fallbacks < self._settings.retries:
            try:
                grant = await self._admission.admit(claim, job.deadline, again=True)
            except (NoEngines, IncompatibleEngines):
                pass  # nobody else: the failure itself says more
            else:
                history.fallbacks += 1
                return grant
        if job.on_failure is not OnFailure.RECOMPUTE or job.route is Route.COLOCATED or history.recomputing:
            raise failure
        history.recomputing = True
        await self._permit(job, history)
        try:
            grant = await self._admission.admit(
                replace(claim, decode_only=True, exclude=history.unable), job.deadline, again=True
            )
        except NoEngines:
            raise failure from None
        history.fallbacks += 1
        log.info("recompute", request_id=job.request_id, prompt_tokens=len(job.prompt), because=failure.reason)
        return grant

    async def _permit(self, job: Job, history: _History) -> None:
        try:
            async with asyncio.timeout(max(job.deadline - self._clock.monotonic(), 0)):
                await self._recomputes.acquire()
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed before its prompt could be computed again") from None
        history.permit = self._recomputes

    def _attempt(self, job: Job, grant: Grant) -> Attempt:
        brief = Brief(
            request_id=job.request_id,
            transfer_id=self._random(16),
            mode=job.mode,
            prompt=job.prompt,
            sampling=job.sampling,
            traceparent=job.trace.traceparent,
            deadline=job.deadline,
            grace=self._settings.grace,
            release_timeout=self._settings.release_timeout,
            # One of several hand-overs may fail when another answer is already being read: too late
            # to try elsewhere.
            recompute=job.sampling.n > 1 and job.on_failure is OnFailure.RECOMPUTE,
        )
        job.attempt = Attempt(brief, grant, self._legs, self._owner, self._clock)
        if job.cancelled:
            job.cancel()
        return job.attempt

    def _dispatched(self, job: Job, history: _History) -> None:
        now = self._clock.monotonic_ns()
        if history.fallbacks:
            job.points[Point.REDISPATCHED] = now
        else:
            job.points[Point.ROUTED] = now

    def _note_failure(self, job: Job, history: _History, attempt: Attempt, error: PdserveError) -> None:
        """Raises the error where it ends the request."""
        again = error.retryable or isinstance(error, TicketRefused)  # a restarted engine, a ticket that waited too long
        if not again or (job.on_failure is OnFailure.FAIL and isinstance(error, TransferFailed)):
            raise error
        blamed = attempt.blame(error)
        log.info(
            "attempt_failed",
            request_id=job.request_id,
            reason=error.reason,
            error=error.message,
            blamed=blamed,
            fallbacks=history.fallbacks,
        )
        history.error = error
        if blamed:
            history.exclude |= {blamed}
            if not isinstance(error, KvdUnavailable):  # without its kvd an engine still computes
                history.unable |= {blamed}

    def _first_token(self, job: Job, attempt: Attempt, stamps: Stamps) -> None:
        points = job.points
        points[Point.TOKEN_RECEIVED] = attempt.first_token_ns
        points.update(parts.align(stamps, self._boot_id, attempt.decode_sent_ns, attempt.first_token_ns))

    def _finished(self, job: Job, history: _History, attempt: Attempt, done: Done) -> Finished:
        choice, ready = attempt.grant.choice, attempt.ready
        handed_over = choice.prefill is not None
        now = self._clock.monotonic_ns()
        job.points.setdefault(Point.FIRST_BYTE_WRITTEN, now)
        if ready is not None:
            job.points.update(parts.align(ready.stamps, self._boot_id, attempt.prefill_sent_ns, attempt.ready_ns))
        path = parts.chain(handed_over=handed_over, retried=history.fallbacks > 0)
        timings = parts.split(job.points, path, now)
        fallbacks = history.fallbacks
        if handed_over:
            cached, recomputed = (ready.cached_tokens if ready else 0), done.recomputed_tokens
            fallbacks += bool(recomputed) and job.on_failure is OnFailure.RECOMPUTE
        else:
            cached = done.cached_tokens
            recomputed = len(job.prompt) - cached if history.recomputing else 0
        log.debug(
            "request_finished",
            request_id=job.request_id,
            trace_id=job.trace.trace_id,
            ttft=timings.ttft,
            e2e=timings.e2e,
            fallbacks=fallbacks,
            recomputed_tokens=recomputed,
        )
        return Finished(
            usage=Usage(len(job.prompt), cached, done.completion_tokens),
            timings=timings,
            transfer=done.facts if handed_over else None,
            mode=job.mode if handed_over else None,
            recomputed_tokens=recomputed,
            fallbacks=fallbacks,
            prefill_engine_id=choice.prefill.engine_id if choice.prefill else "",
            decode_engine_id=choice.decode.engine_id,
        )
