"""Which tokens of which requests a simulated engine computes in a step. Pure.

It does what vLLM's scheduler does and calls the hand-over in the same order and as often, so that
what holds here holds there: running requests first, preemption from the tail when blocks run out,
no admission in a step that preempted, a whole prompt's blocks at admission, a hand-over's blocks
awaited in WAITING_FOR_REMOTE, the last prompt token computed here after it. A completion for a
request that does not await one is a defect and raises, as vLLM's assertions do.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.handoff.scheduler import ScheduledChunk, SchedulerHandoff, StepPlan
from pdserve.engine.handoff.worker import Completed
from pdserve.engine.port import Consume
from pdserve.engine.sim.allotment import Allotment
from pdserve.engine.sim.blocks import BlockPool
from pdserve.engine.sim.config import SimConfig
from pdserve.engine.sim.requests import SimRequest, Status
from pdserve.rpc.errors import PdserveError


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step."""

    request: SimRequest
    start: int
    """First position computed."""
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduling round."""

    work: tuple[Work, ...]
    plan: StepPlan


_NO_PLAN = StepPlan(0)


class SimScheduler:
    """`handoff` is None for an engine that is alone."""

    def __init__(self, config: SimConfig, handoff: SchedulerHandoff | None) -> None:
        self._config = config
        self._handoff = handoff
        self.pool = BlockPool(config.num_blocks)
        self._allotment = Allotment(config, self.pool)
        self.requests: dict[str, SimRequest] = {}
        """All that exist, by handle: also finished ones whose blocks a hand-over holds."""
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()
        self._remote: dict[str, SimRequest] = {}
        self._landed: deque[SimRequest] = deque()
        self.preemptions = 0

    @property
    def waiting_count(self) -> int:
        """Requests that do not run yet."""
        return len(self.waiting) + len(self._remote) + len(self._landed)

    @property
    def has_requests(self) -> bool:
        """Whether anything exists, also what only waits for a hand-over."""
        return bool(self.requests)

    def add(self, request: SimRequest) -> None:
        """Takes a new request."""
        self.requests[request.handle] = request
        self.waiting.append(request)

    # -- one round --------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Chooses the next step; may be empty."""
        budget = self._config.token_budget
        work: list[Work] = []
        preempted: list[str] = []
        budget = self._schedule_running(work, preempted, budget)
        if not preempted:
            budget = self._schedule_landed(work, budget)
            self._schedule_waiting(work, budget)
        plan = self._plan(work, preempted)
        for item in work:
            item.request.computed = item.start + item.count
        return Step(tuple(work), plan)

    def _schedule_running(self, work: list[Work], preempted: list[str], budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(len(request.tokens) - request.computed, budget)
            while not self._allotment.grow(request, request.computed + count):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim.handle)
                if victim is request:
                    return budget
            work.append(Work(request, request.computed, count))
            budget -= count
            index += 1
        return budget

    def _schedule_landed(self, work: list[Work], budget: int) -> int:
        """Requests whose hand-over is over and which hold their blocks."""
        while self._landed and budget > 0 and len(self.running) < self._config.max_seqs:
            request = self._landed.popleft()
            if request.computed == 0:  # a prompt of one token: asked again
                self._matched(request, 0)
            self._allocated(request, request.computed, 0)
            budget -= self._run(request, request.computed, work, budget)
        return budget

    def _schedule_waiting(self, work: list[Work], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._config.max_seqs:
            request = self.waiting[0]
            found = self._allotment.find_cached(request)
            local = len(found) * self._config.block_size
            external, asynchronous = self._matched(request, local)
            count = 0 if asynchronous else min(len(request.tokens) - local, budget)
            if not self._allotment.admit(request, found, local + external + count, self.running):
                return
            self.waiting.popleft()
            self._allocated(request, local, external)
            if request.started:
                request.recomputed_tokens = max(0, request.prompt_tokens - local)
            else:
                request.local_tokens, request.started = local, True
            request.cached_blocks = len(found)
            if asynchronous:
                request.status = Status.WAITING_FOR_REMOTE
                request.computed = local + external
                self._remote[request.handle] = request
            else:
                budget -= self._run(request, local, work, budget)

    def _run(self, request: SimRequest, computed: int, work: list[Work], budget: int) -> int:
        count = min(len(request.tokens) - computed, budget)
        request.status = Status.RUNNING
        request.computed = computed
        self.running.append(request)
        work.append(Work(request, computed, count))
        return count

    def _plan(self, work: list[Work], preempted: list[str]) -> StepPlan:
        if self._handoff is None:
            return _NO_PLAN
        wanted = self._handoff.announcing
        chunks = (
            ScheduledChunk(w.request.handle, w.request.block_ids, w.start, w.count)
            for w in work
            if w.request.handle in wanted
        )
        return self._handoff.step(chunks, preempted)

    def _preempt(self, request: SimRequest) -> None:
        self.preemptions += 1
        self._allotment.free(request)
        request.computed = 0
        request.status = Status.PREEMPTED
        self.waiting.appendleft(request)

    # -- the hand-over ----------------------------------------------------------------------

    def _matched(self, request: SimRequest, local: int) -> tuple[int, bool]:
        if self._handoff is None:
            return 0, False
        return self._handoff.matched(request.handle, request.request.kv, request.prompt_tokens, local)

    def _allocated(self, request: SimRequest, local: int, external: int) -> None:
        if self._handoff is not None:
            self._handoff.allocated(
                request.handle, request.request.kv, request.prompt_tokens, request.block_ids, local, external
            )

    # -- after a step -----------------------------------------------------------------------

    def computed(self, step: Step) -> list[SimRequest]:
        """The step is done: caches its blocks. Returns the requests that sample a token now."""
        sampling = []
        for item in step.work:
            if item.request.status is Status.RUNNING:
                self._allotment.cache(item.request)
                if item.request.computed == len(item.request.tokens):
                    sampling.append(item.request)
        return sampling

    def finish(self, request: SimRequest, by_length: bool) -> bool:
        """The request is over, or is given up (`by_length` False). Returns whether a producer's
        blocks are on offer. Safe twice."""
        if request.status is Status.FINISHED:
            return False
        hold = request.status is Status.WAITING_FOR_REMOTE
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request in self._landed:
            self._landed.remove(request)
        elif hold:
            del self._remote[request.handle]
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        offered = None
        if self._handoff is not None:
            delay, offered = self._handoff.finished(
                request.handle, request.request.kv, request.block_ids, request.computed, by_length
            )
            hold |= delay
        if not hold:
            self._forget(request)
        return offered is not None

    def completed(self, done: Completed) -> tuple[list[SimRequest], list[SimRequest]]:
        """Takes what the hand-over says is over. Returns (producers whose blocks are free now,
        consumers that must not or need not wait any longer and whose bytes are not there).

        Raises:
            PdserveError: a completion that nobody awaits.
        """
        failed = []
        for handle in done.received:
            request = self._known(handle)
            if request.status is Status.FINISHED:  # aborted meanwhile
                self._forget(request)
                continue
            if self._remote.pop(handle, None) is None:
                raise PdserveError(f"{handle} was completed while {request.status.value}")
            if handle in done.failed:
                failed.append(request)
                self._allotment.free(request)
                request.computed = 0
                request.status = Status.WAITING
                self.waiting.appendleft(request)
            else:
                self._allotment.cache(request)
                request.computed = min(request.computed, len(request.tokens) - 1)
                request.handed_over = True
                request.status = Status.WAITING
                self._landed.append(request)
        sent = [self._known(handle) for handle in done.sent]
        return sent, failed

    def release(self, requests: Iterable[SimRequest]) -> None:
        """Frees what `completed` returned as sent.

        Raises:
            PdserveError: a request that still runs.
        """
        for request in requests:
            if request.status is not Status.FINISHED:
                raise PdserveError(f"{request.handle} was released while {request.status.value}")
            self._forget(request)

    def _known(self, handle: str) -> SimRequest:
        request = self.requests.get(handle)
        if request is None:
            raise PdserveError(f"the hand-over completed {handle}, which does not exist")
        return request

    def _forget(self, request: SimRequest) -> None:
        self._allotment.free(request)
        del self.requests[request.handle]

    # -- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises PdserveError unless free + held = total and every reference has an owner."""
        self.pool.check(request.block_ids for request in self.requests.values())

    def recomputes(self, request: SimRequest) -> bool:
        """Whether a failed hand-over is made good by computing here."""
        kv = request.request.kv
        return isinstance(kv, Consume) and kv.recompute
