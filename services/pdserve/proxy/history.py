"""What has been tried of one request, what came of it, and what its end says of all that."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.proxy import parts
from pdserve.proxy.attempt import Attempt
from pdserve.proxy.continuing import Part, Telling
from pdserve.proxy.ended import Ended, Outcome, Tried
from pdserve.proxy.job import Job
from pdserve.proxy.legs import Done
from pdserve.proxy.parts import Point
from pdserve.proxy.types import Delta, Finished, OnFailure, Usage
from pdserve.rpc.errors import KvdUnavailable, PdserveError, RequestCancelled


@dataclass(slots=True)
class History:
    """Of one job; kept by the driver while the job runs."""

    part: Part
    """What the next attempt is asked for."""
    telling: Telling
    boot_id: str
    """Of this host: which stamps share its clock."""
    fallbacks: int = 0
    continuations: int = 0
    exclude: frozenset[str] = frozenset()
    """Engines that failed it: no hand-over with them again."""
    unable: frozenset[str] = frozenset()
    """Those of them that cannot compute it alone either."""
    alone: bool = False
    """This attempt computes the prompt at decode because hand-overs failed, or none can be begun."""
    last_resort: bool = False
    """That was tried before the first token."""
    error: PdserveError | None = None
    """Of the last attempt."""
    permit: asyncio.Semaphore | None = None
    """Held while a prompt is computed again."""
    first: Attempt | None = None
    """The attempt that gave the first token."""
    stamped: Mapping[int, int] = field(default_factory=dict)
    """By Point: what that attempt's legs had stamped when it ended. What prefill says later (WRITE) is in nobody's
    numbers, or the client's would not be the trace's."""
    outlived: bool = False
    """It has waited once for what comes in the place of an engine that died: a prompt may be why engines die."""
    waited: bool = False
    """The last attempt has failed, and other engines were not there at once."""
    told: int = 0
    """Tokens that the client had when this attempt began."""
    tried: list[Tried] = field(default_factory=list)
    heard_ns: dict[int, int] = field(default_factory=dict)
    """When tokens came last, by answer."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of the answers that the client has whole."""
    finished: Finished | None = None
    finished_ns: int = 0

    @classmethod
    def of(cls, job: Job, boot_id: str) -> "History":
        """Before the first attempt."""
        whole = Part(job.prompt, job.sampling)
        return cls(whole, Telling(whole), boot_id)

    def hear(self, delta: Delta) -> Delta | None:
        """What of an attempt's delta is new to the client; see Telling.hear."""
        new = self.telling.hear(delta)
        if new is not None and new.finish is not None:
            self.finish_reasons.append(new.finish.value)
        return new

    def gap(self, delta: Delta, now_ns: int) -> float | None:
        """Seconds since the same answer's last tokens; None where these are the first, or none."""
        if not delta.token_ids:
            return None
        before, self.heard_ns[delta.index] = self.heard_ns.get(delta.index), now_ns
        return None if before is None else (now_ns - before) / 1e9

    def let_go(self) -> None:
        """The prompt is computed; safe twice."""
        if self.permit is not None:
            self.permit.release()
            self.permit = None

    def begins_alone(self) -> None:
        """Its first attempt computes the prompt at decode: no hand-over can be begun."""
        self.alone = self.last_resort = True

    def moved(self, *, alone: bool) -> None:
        """Another attempt has its engines."""
        self.alone = alone
        if self.telling.begun:
            self.continuations += 1
        else:
            self.fallbacks += 1
            self.last_resort |= alone

    def note(self, job: Job, attempt: Attempt, reason: str = "", error: str = "", blamed: str = "") -> None:
        """An attempt has ended."""
        choice, course = attempt.grant.choice, attempt.course(self.boot_id)
        handed_over = choice.prefill is not None
        if self.first in (None, attempt):
            self.stamped = course.points
        self.tried.append(
            Tried(
                prefill_engine_id=choice.prefill.engine_id if choice.prefill else "",
                decode_engine_id=choice.decode.engine_id,
                transfer_id=attempt.transfer_id.hex() if handed_over else "",
                mode=job.mode if handed_over else None,
                tokens=self.telling.count - self.told,
                reason=reason,
                error=error,
                blamed=blamed,
                course=course,
            )
        )
        self.told = self.telling.count
        self.waited = False

    def waits(self) -> None:
        """Its last attempt has failed, and other engines are not there at once."""
        self.waited = True

    def failed(self, job: Job, attempt: Attempt, error: PdserveError) -> None:
        """An attempt has ended with an error; the next avoids the engine at fault."""
        blamed = attempt.blame(error)
        self.note(job, attempt, error.reason, error.message, blamed)
        self.error = error
        if blamed:
            self.exclude |= {blamed}
            if not isinstance(error, KvdUnavailable):  # without its kvd an engine still computes
                self.unable |= {blamed}

    def sum(self, job: Job, attempt: Attempt, done: Done, now_ns: int) -> Finished:
        """What the client is told at the end. The way to the first token is the first attempt's that
        gave one; the engines and the hand-over are the last's."""
        choice, first = attempt.grant.choice, self.first or attempt
        first_handed_over, ready = first.grant.choice.prefill is not None, first.ready
        job.points.setdefault(Point.FIRST_BYTE_WRITTEN, now_ns)
        timings = parts.split(
            {**job.points, **self.stamped},
            parts.chain(handed_over=first_handed_over, retried=self.fallbacks > 0),
            now_ns,
            job.mode if first_handed_over else None,
        )
        self.finished_ns = now_ns
        cached = ready.cached_tokens if ready else 0
        if not first_handed_over and first is attempt:  # else the engine that knew it is gone
            cached = done.cached_tokens
        recomputed, fallbacks = done.recomputed_tokens, self.fallbacks
        if choice.prefill is None:
            recomputed = len(self.part.prompt) - done.cached_tokens if self.alone else 0
        else:
            fallbacks += bool(recomputed) and job.on_failure is OnFailure.RECOMPUTE
        self.finished = Finished(
            usage=Usage(len(job.prompt), cached, self.telling.count if self.continuations else done.completion_tokens),
            timings=timings,
            transfer=done.facts if choice.prefill else None,
            mode=job.mode if choice.prefill else None,
            recomputed_tokens=recomputed,
            fallbacks=fallbacks,
            continuations=self.continuations,
            prefill_engine_id=choice.prefill.engine_id if choice.prefill else "",
            decode_engine_id=choice.decode.engine_id,
        )
        return self.finished

    def end(self, job: Job, error: PdserveError | None, now_ns: int) -> Ended:
        """The record; `error` is what the client got, if it got one."""
        outcome = Outcome.FINISHED
        if error is not None:
            outcome = Outcome.CANCELLED if isinstance(error, RequestCancelled) else Outcome.FAILED
        return Ended(
            request_id=job.request_id,
            trace=job.trace,
            model=job.model,
            chat=job.chat,
            sampling=job.sampling,
            outcome=outcome,
            reason=error.reason if error else "",
            error=error.message if error else "",
            prompt_tokens=len(job.prompt),
            completion_tokens=self.telling.count,
            fallbacks=self.finished.fallbacks if self.finished else self.fallbacks,
            continuations=self.continuations,
            attempts=tuple(self.tried),
            finished=self.finished,
            finish_reasons=tuple(self.finish_reasons),
            points={**job.points, **(self.stamped if self.first else {})},
            ended_ns=self.finished_ns or now_ns,
            waited=self.waited,
        )
