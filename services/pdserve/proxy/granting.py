"""Which engines the next attempt of a request gets, and what it waits for.

First any that fit. After a failure others, then decode alone (under a cap on how many do so at once), then the failure.
Where no engines could make an attempt at this moment, not even empty ones, the request is held for some: one that is
replaced is gone before the next is there. After a failure only where the engines that failed are going.

A kvd that drains begins no hand-over: who may have its prompt computed at decode gets that at once, under the same cap.
"""

import asyncio
from dataclasses import replace

from pdserve.proxy.admission import Admission, Claim, Grant
from pdserve.proxy.history import History
from pdserve.proxy.job import Job
from pdserve.proxy.parts import Point
from pdserve.proxy.routing import Need
from pdserve.proxy.types import OnFailure, Route
from pdserve.rpc.errors import (
    DeadlinePassed,
    Draining,
    EngineDied,
    IncompatibleEngines,
    KvdUnavailable,
    NoEngines,
    PdserveError,
)
from pdserve.runtime.clock import Clock


class Granting:
    """Asks admission for a driver's jobs."""

    def __init__(self, admission: Admission, clock: Clock, *, headroom: int, retries: int, recomputes: int) -> None:
        """See ProxyConfig: `admission_headroom` and the others by their names."""
        self._admission = admission
        self._clock = clock
        self._headroom = headroom
        self._retries = retries
        self._recomputes = asyncio.Semaphore(recomputes)

    async def next(self, job: Job, history: History) -> Grant:
        """The engines of the next attempt.

        Raises:
            PdserveError: the last failure, where no others are left; before the first attempt what Admission.admit
                and Admission.hold raise.
        """
        part = history.part
        need = Need(len(part.prompt), part.sampling.max_tokens or 1, part.sampling.n, self._headroom)
        claim = Claim(job.model, need, job.route, history.exclude)
        if history.error is not None:
            return await self._elsewhere(job, history, claim, history.error)
        again = False  # who was held has had a place in the queue
        while True:
            try:
                if claim.decode_only:
                    await self._permit(job, history)
                grant = await self._admission.admit(claim, job.deadline, again=again)
            except NoEngines:
                history.let_go()
                await self._admission.hold((claim,), job.deadline, job.waited)
                again = True
            except KvdUnavailable:
                if not _recomputes(job):
                    raise
                claim = replace(claim, decode_only=True)
                history.begins_alone()
            else:
                job.points[Point.ADMITTED] = self._clock.monotonic_ns()
                return grant

    async def _elsewhere(self, job: Job, history: History, claim: Claim, failure: PdserveError) -> Grant:
        begun = history.telling.begun  # and then the failure that led here was counted against the bound
        pair = claim if begun or history.fallbacks < self._retries else None
        alone: Claim | None = None
        if _recomputes(job) and (begun or not history.last_resort):
            alone = replace(claim, decode_only=True, exclude=history.unable)
        claims = [one for one in (pair, alone) if one is not None]
        while claims:
            grant = await self._others(job, history, pair, alone)
            if grant is not None:
                return grant
            if not isinstance(failure, Draining | EngineDied) and any(
                self._admission.could(replace(one, exclude=frozenset())) for one in claims
            ):
                break  # those that failed it are still there, and nobody is about to take their place
            if isinstance(failure, EngineDied):
                if history.outlived:
                    break  # the one that came in a dead one's place has died of it, too
                history.outlived = True
            try:
                await self._admission.hold(claims, job.deadline, job.waited, waits=history.waits)
            except (NoEngines, KvdUnavailable, IncompatibleEngines):
                break  # the failure itself says more
        raise failure

    async def _others(self, job: Job, history: History, pair: Claim | None, alone: Claim | None) -> Grant | None:
        """None: nobody could, however empty."""
        if pair is not None:
            try:
                grant = await self._admission.admit(pair, job.deadline, again=True, waits=history.waits)
            except (NoEngines, KvdUnavailable, IncompatibleEngines):
                pass
            else:
                history.moved(alone=False)
                return grant
        if alone is not None:
            await self._permit(job, history)
            try:
                grant = await self._admission.admit(alone, job.deadline, again=True, waits=history.waits)
            except NoEngines:
                history.let_go()
            else:
                history.moved(alone=True)
                return grant
        return None

    async def _permit(self, job: Job, history: History) -> None:
        if self._recomputes.locked():
            history.waits()
        try:
            async with asyncio.timeout(max(job.deadline - self._clock.monotonic(), 0)):
                await self._recomputes.acquire()
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed before its prompt could be computed again") from None
        history.permit = self._recomputes


def _recomputes(job: Job) -> bool:
    """Whether its prompt may be computed at decode where it cannot be handed over."""
    return job.on_failure is OnFailure.RECOMPUTE and job.route is not Route.COLOCATED
