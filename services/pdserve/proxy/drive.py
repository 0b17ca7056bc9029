"""A request's life after admission control has its needs: grant, attempt, retry, continue, answer.

When an attempt fails and its error says that another try may succeed:
- before the first token has reached the client: first other engines with a fresh transfer, then the
  prompt computed at decode (`granting.py`), then the error;
- after it, where the answer can be taken up (`continuing.py`): the same choice of engines for the
  prompt and what the client has, at most `continuations` times; then the error.

The policy `fail` ends a request at its first failed hand-over. Once an attempt has given a token its
hand-over has succeeded: what fails later is an engine, and an engine that is gone is replaced under
either policy.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from pdserve.proxy import ended
from pdserve.proxy.admission import Admission, Grant
from pdserve.proxy.attempt import Attempt
from pdserve.proxy.brief import Brief
from pdserve.proxy.continuing import Diverged
from pdserve.proxy.granting import Granting
from pdserve.proxy.history import History
from pdserve.proxy.job import Job
from pdserve.proxy.legs import Done, Legs
from pdserve.proxy.owner import Owner
from pdserve.proxy.parts import Point
from pdserve.proxy.trace import RandomBytes
from pdserve.proxy.types import Event, Mode, OnFailure, Started
from pdserve.rpc.errors import (
    DeadlinePassed,
    Draining,
    PdserveError,
    RequestCancelled,
    TicketRefused,
    TransferFailed,
)
from pdserve.runtime.clock import Clock, boot_id

AHEAD = 0.05
"""Seconds by which a client's own timer may end a call before our deadline."""

Gap = Callable[[float, Mode | None], None]
"""Told of the seconds between one piece of an answer and the next, and how it was handed over, if it was."""


def _unheard(seconds: float, mode: Mode | None) -> None:
    """Nobody counts gaps."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """The driver's share of the configuration; see ProxyConfig."""

    headroom: int = 256
    retries: int = 2
    continuations: int = 2
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
        sink: ended.Sink = ended.to_log,
        gap: Gap = _unheard,
    ) -> None:
        """`sink`: is told once of each job's end. `gap`: neither blocks nor raises."""
        self._admission = admission
        self._legs = legs
        self._owner = owner
        self._clock = clock
        self._random = random
        self._settings = settings
        self._sink = sink
        self._gap = gap
        self._boot_id = boot_id()
        self._granting = Granting(
            admission, clock, headroom=settings.headroom, retries=settings.retries, recomputes=settings.recomputes
        )
        self._jobs: set[Job] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Jobs that have not ended, waiting ones too."""
        return len(self._jobs)

    async def idle(self) -> None:
        """Waits until no job runs; the caller bounds the wait."""
        await self._idle.wait()

    def stop(self, why: str) -> None:
        """Ends every job with DRAINING, those that wait too, and all that come; safe twice."""
        self._admission.stop(why)
        for job in tuple(self._jobs):
            job.end(Draining(why))  # which gives its permit back, if it has one, to who is refused next

    async def run(self, job: Job) -> AsyncGenerator[Event, None]:
        """Started, deltas, Finished; closing the generator early ends both legs.

        Raises:
            PdserveError: the request failed; nothing is held afterwards.
        """
        history = History.of(job, self._boot_id)
        error: PdserveError | None = None
        self._jobs.add(job)
        self._idle.clear()
        try:
            while True:
                attempt = self._attempt(job, history, await self._granting.next(job, history))
                try:
                    mode = job.mode if attempt.grant.choice.prefill else None
                    if not history.tried:
                        yield Started(job.request_id, job.trace.trace_id, job.model, mode)
                    self._dispatched(job, history, attempt)
                    await attempt.open()
                    done: Done | None = None
                    while not isinstance(event := await attempt.next(), Done):
                        history.let_go()
                        delta = history.hear(event.delta)
                        if delta is None:
                            continue
                        history.first = history.first or attempt
                        if (gap := history.gap(delta, self._clock.monotonic_ns())) is not None:
                            self._gap(gap, mode)
                        yield delta
                        if attempt.moments.first_byte_ns:
                            continue
                        # The face asks for more once it has written the first.
                        attempt.moments.first_byte_ns = self._clock.monotonic_ns()
                        job.points.setdefault(Point.FIRST_BYTE_WRITTEN, attempt.moments.first_byte_ns)
                    done = event
                    await attempt.finish()
                    attempt.close(None)
                    history.note(job, attempt)
                except PdserveError as failure:
                    done = self._failed(job, history, attempt, failure)
                except Diverged as other:
                    assert history.error is not None, "only a continued answer can be another one"
                    attempt.close(RequestCancelled("its answer cannot be joined to the one begun"))
                    history.note(job, attempt, "DIVERGED", str(other))
                    raise history.error from other
                except Exception as defect:
                    error = _defect(defect)
                    attempt.close(error)
                    history.note(job, attempt, error.reason, error.message)
                    raise
                except BaseException:
                    gone = self._gone(job)
                    attempt.close(gone)
                    history.note(job, attempt, gone.reason, gone.message)
                    raise
                if done is not None:
                    yield history.sum(job, attempt, done, self._clock.monotonic_ns())
                    return
        except PdserveError as failure:
            error = failure
            raise
        except (GeneratorExit, asyncio.CancelledError):
            # A face that has the whole answer need not come back for more.
            error = None if history.finished else self._gone(job)
            raise
        except Exception as defect:
            error = _defect(defect)
            raise
        finally:
            history.let_go()
            self._jobs.discard(job)
            if not self._jobs:
                self._idle.set()
            self._sink(history.end(job, error, self._clock.monotonic_ns()))

    def _attempt(self, job: Job, history: History, grant: Grant) -> Attempt:
        part = history.part
        brief = Brief(
            request_id=job.request_id,
            transfer_id=self._random(16),
            mode=job.mode,
            prompt=part.prompt,
            sampling=part.sampling,
            traceparent=job.trace.below(job.trace.attempt_id(len(history.tried) + 1)),
            deadline=job.deadline,
            grace=self._settings.grace,
            release_timeout=self._settings.release_timeout,
            # One of several hand-overs may fail when another answer is already being read: too late
            # to try elsewhere.
            recompute=job.sampling.n > 1 and job.on_failure is OnFailure.RECOMPUTE,
        )
        job.attempt = Attempt(brief, grant, self._legs, self._owner, self._clock)
        if job.ended_by is not None:
            job.attempt.close(job.ended_by)
        return job.attempt

    def _dispatched(self, job: Job, history: History, attempt: Attempt) -> None:
        attempt.moments.dispatched_ns = self._clock.monotonic_ns()
        if not history.telling.begun:
            point = Point.REDISPATCHED if history.fallbacks else Point.ROUTED
            job.points[point] = attempt.moments.dispatched_ns

    def _failed(self, job: Job, history: History, attempt: Attempt, error: PdserveError) -> Done | None:
        """None: the next attempt is prepared. Done: nothing of the answer is missing but decode's last
        word. Raises the error where it ends the request."""
        history.let_go()
        attempt.close(error)
        if job.ended_by is not None:
            gone = self._gone(job)
            history.note(job, attempt, gone.reason, gone.message)
            raise gone
        history.failed(job, attempt, error)
        if history.telling.complete:
            return Done(history.telling.count, 0, 0)
        again = error.retryable or isinstance(error, TicketRefused)  # a restarted engine, a ticket that waited too long
        hand_over = isinstance(error, TransferFailed) and not attempt.moments.first_token_ns
        if not again or (hand_over and job.on_failure is OnFailure.FAIL):
            raise error
        if history.telling.begun:
            part = None
            if history.continuations < self._settings.continuations:
                part = history.telling.resume()
            if part is None:
                raise error
            history.part = part
        return None

    def _gone(self, job: Job) -> PdserveError:
        """Why nobody takes the answer any more; a call that ends does not say whether its time was over."""
        if isinstance(job.ended_by, Draining):
            return job.ended_by
        if self._clock.monotonic() >= job.deadline - AHEAD:
            return DeadlinePassed("the request's deadline passed")
        return RequestCancelled("the client went away")


def _defect(error: Exception) -> PdserveError:
    """What records and engines are told of an error that only a defect of ours explains."""
    return PdserveError(f"{type(error).__name__}: {error}")
