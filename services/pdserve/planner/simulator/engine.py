"""One engine: which sequences compute what in a step, and the KV memory they hold. Pure; the time is passed in.

The rules are vLLM's, as the simulated engine has them: running sequences first, each decoding one
token or computing a chunk within the token budget; preemption from the tail, by recompute, where the
memory cannot grow; no admission in a step that preempted; first come, first served. A consumer's
memory is reserved at a step's beginning, and it decodes in the first step that begins after its KV
has landed. Sequences that decode are counted, not walked: nothing here costs time per token.

    begin(now)  ->  run under way  ->  interrupt(now)?  ->  end()  ->  begin(now) ...
"""

import heapq
from bisect import bisect_left
from collections import deque
from itertools import accumulate, count

from pdserve.planner.simulator.fleet import EngineSpec, Role
from pdserve.planner.simulator.requests import Sequence
from pdserve.planner.simulator.runs import Ended, Run, Spent

MOST_STEPS = 64
"""Of one run: a run that is interrupted was planned in vain beyond that point."""


class Engine:
    """See the module."""

    def __init__(self, role: Role, spec: EngineSpec, *, jump: bool) -> None:
        """`jump`: whether a run may have several steps."""
        self.role = role
        """What it is routed to for."""
        self.acts_as = role
        """Whose costs and budgets `spec` has; a run under way keeps them."""
        self.spec = spec
        self.alive = True
        self.poked = False
        """Whether a beginning is scheduled."""
        self.run: Run | None = None
        self.version = 0
        """Raised whenever the run's end has moved; an older end is void."""
        self.ends: list[float] = []
        """When each decode step ended, seconds; steps without decoding are not here."""
        self.spent = Spent()
        self.used = 0
        """KV tokens held."""
        self._jump = jump
        self._order = count()
        self._clear()

    def _clear(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._awaiting: dict[Sequence, None] = {}
        self._landed: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}
        self._partial: dict[Sequence, None] = {}
        """Those of `_running` whose prompt is not computed yet."""
        self._pinned: dict[Sequence, None] = {}
        self._decoding = 0
        self._context = 0
        """Tokens held by those that decode."""
        self._due: list[tuple[int, int, Sequence]] = []
        """(decode step after which it is complete, order, sequence), some of them stale."""

    # -- what comes from outside ------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self._waiting.append(sequence)

    def land(self, sequence: Sequence) -> None:
        """An accepted consumer's KV is here."""
        del self._awaiting[sequence]
        self._landed.append(sequence)

    def release(self, sequence: Sequence, now: float) -> None:
        """A producer's KV was taken."""
        self._note_high(now)
        del self._pinned[sequence]
        self.used -= sequence.held

    def drop(self, sequence: Sequence, now: float) -> None:
        """Gives up a sequence that does not decode."""
        self._note_high(now)
        sequence.over = True
        for place in (self._awaiting, self._pinned, self._running):
            if sequence in place:
                del place[sequence]
                self._partial.pop(sequence, None)
                self.used -= sequence.held
                return
        if sequence in self._landed:
            self._landed.remove(sequence)
            self.used -= sequence.held
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _note_high(self, now: float) -> None:
        """Before memory is freed during a run: what the run's steps have taken so far counts."""
        grown = 0
        if self.run is not None:
            grown = self.run.decoding * bisect_left(self.run.ends, now, 0, self.run.steps)
        self.spent.kv_high = max(self.spent.kv_high, self.used + grown)

    def interrupt(self, now: float) -> bool:
        """Ends the run with the step under way at `now`, since what to do next has changed. Returns
        whether its end has moved."""
        run = self.run
        if run is None or run.steps == 1:
            return False
        steps = bisect_left(run.ends, now, 0, run.steps) + 1
        if steps >= run.steps:
            return False
        run.steps = steps
        self.version += 1
        return True

    def die(self, index: int, now: float) -> list[Sequence]:
        """All is lost but what was told: tokens of steps that ended before `now`. Returns all sequences."""
        if self.run is not None:
            done = bisect_left(self.run.ends, now, 0, self.run.steps)
            self.run.steps, self.run.chunks = done, []
            if done:
                self._advance(self.run)
            self.run = None
            self.version += 1
        lost = [*self._running, *self._waiting, *self._awaiting, *self._landed, *self._pinned]
        for sequence in lost:
            if sequence.joined >= 0:
                self._leave(sequence, index)
            sequence.over = True
        self.alive = False
        self.used = 0
        self._clear()
        return lost

    # -- a run ------------------------------------------------------------------------------

    def begin(self, index: int, now: float) -> list[Sequence]:
        """Plans the next run, if there is anything to do. Returns consumers whose memory is reserved now."""
        spec = self.spec
        preempted = self._grow(index)
        budget = spec.token_budget - self._decoding
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._partial:
            tokens = min(budget, sequence.need - sequence.computed)
            if tokens <= 0:
                break
            chunks.append((sequence, tokens))
            budget -= tokens
        # Where a preemption left nothing to run, the step is empty and the next one, which admits, begins at once.
        waits = preempted and (self._decoding or chunks)
        accepted = [] if waits else self._admit(now, budget, chunks)
        decoding = self._decoding
        if not decoding and not chunks:
            return accepted
        if chunks or preempted or not self._jump:
            steps = 1
        else:
            room = (spec.kv_tokens - self.used) // decoding
            steps = min(self._next_due() - len(self.ends), room, MOST_STEPS)
        if chunks:
            tokens = sum(part for _, part in chunks)
            ends = [now + spec.cost.step_time(tokens, decoding, self._context)]
        else:
            times = spec.cost.decode_times(decoding, self._context, steps)
            ends = list(accumulate(times, initial=now))[1:]
        self.run = Run(now, ends, steps, chunks, decoding)
        self.version += 1
        return accepted

    def end(self, index: int) -> Ended:
        """The run is over."""
        run = self.run
        if run is None:
            raise RuntimeError("no run is under way")
        self.run = None
        self._advance(run)
        ended = Ended()
        now = run.ends[run.steps - 1]
        for sequence, tokens in run.chunks:
            if sequence.over:
                continue
            sequence.computed += tokens
            if sequence.computed < sequence.need:
                continue
            del self._partial[sequence]
            if sequence.request.prefilled is None:
                sequence.request.prefilled = now
            if sequence.produces:
                del self._running[sequence]
                self._pinned[sequence] = None
                sequence.over = True
                ended.produced.append(sequence)
                continue
            sequence.request.pieces.append(now)
            sequence.request.made += 1
            if sequence.request.left:
                self._join(sequence)
            else:
                self._free(sequence)
                ended.finished.append(sequence)
        while self._due and self._due[0][0] <= len(self.ends):
            at, _, sequence = heapq.heappop(self._due)
            if sequence.joined >= 0 and sequence.joined + sequence.request.left == at:
                self._leave(sequence, index)
                self._free(sequence)
                ended.finished.append(sequence)
        return ended

    def _advance(self, run: Run) -> None:
        """Books a run's steps."""
        steps, grown = run.steps, run.decoding * run.steps
        seconds = run.ends[steps - 1] - run.start
        spent = self.spent
        spent.steps += steps
        if run.decoding:
            self.ends += run.ends if steps == len(run.ends) else run.ends[:steps]
            self.used += grown
            self._context += grown
            spent.decode_tokens += grown
        spent.kv_high = max(spent.kv_high, self.used)
        if not run.chunks:
            spent.decode += seconds
            return
        spent.prefill_tokens += sum(tokens for _, tokens in run.chunks)
        if run.decoding:
            spent.mixed += seconds
        else:
            spent.prefill += seconds

    def _grow(self, index: int) -> bool:
        """Makes room for the token that each decoding sequence adds. Returns whether any was preempted."""
        preempted = False
        while self._decoding and self.used + self._decoding > self.spec.kv_tokens:
            sequence = next(reversed(self._running))
            if sequence.joined >= 0:
                self._leave(sequence, index)
            self._partial.pop(sequence, None)
            self._free(sequence)
            sequence.over = False
            sequence.need = sequence.request.need
            sequence.computed = 0
            sequence.consumes = False
            self._waiting.appendleft(sequence)
            self.spent.preemptions += 1
            preempted = True
        return preempted

    def _admit(self, now: float, budget: int, chunks: list[tuple[Sequence, int]]) -> list[Sequence]:
        spec = self.spec
        accepted = []
        while self._landed and budget > 0 and len(self._running) < spec.max_seqs:
            sequence = self._landed.popleft()
            self._running[sequence] = None
            self.used -= 1  # the place of its first token: from here on it grows as the others do
            sequence.held -= 1
            self._join(sequence)
            budget -= 1
        free = spec.kv_tokens - self.used - self._decoding
        while self._waiting and budget > 0 and len(self._running) < spec.max_seqs:
            sequence = self._waiting[0]
            wanted = sequence.need + sequence.consumes
            if wanted > free:
                break
            self._waiting.popleft()
            free -= wanted
            self.used += wanted
            sequence.held = wanted
            if sequence.consumes:
                sequence.accepted = now
                self._awaiting[sequence] = None
                accepted.append(sequence)
                continue
            tokens = min(budget, sequence.need - sequence.computed)
            budget -= tokens
            chunks.append((sequence, tokens))
            sequence.begun = now
            self._running[sequence] = None
            self._partial[sequence] = None
        self.spent.kv_high = max(self.spent.kv_high, self.used)
        return accepted

    def _join(self, sequence: Sequence) -> None:
        """It decodes from the next decode step on."""
        sequence.joined = len(self.ends)
        self._decoding += 1
        self._context += sequence.held
        heapq.heappush(self._due, (sequence.joined + sequence.request.left, next(self._order), sequence))

    def _leave(self, sequence: Sequence, index: int) -> None:
        """It decodes no more; what it has decoded is the request's."""
        steps = len(self.ends) - sequence.joined
        if steps:
            sequence.request.pieces.append((index, sequence.joined, len(self.ends)))
            sequence.request.made += steps
        sequence.held += steps
        self._decoding -= 1
        self._context -= sequence.held
        sequence.joined = -1

    def _free(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self.used -= sequence.held
        sequence.held = 0
        sequence.over = True

    def _next_due(self) -> int:
        while True:
            at, _, sequence = self._due[0]
            if sequence.joined >= 0 and sequence.joined + sequence.request.left == at:
                return at
            heapq.heappop(self._due)

    # -- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RuntimeError unless what is held adds up and fits. Not during a run."""
        held = sum(
            sequence.held + (len(self.ends) - sequence.joined if sequence.joined >= 0 else 0)
            for place in (self._running, self._awaiting, self._landed, self._pinned)
            for sequence in place
        )
        if held != self.used or not 0 <= self.used <= self.spec.kv_tokens:
            raise RuntimeError(f"KV does not add up: {held} held, {self.used} booked, of {self.spec.kv_tokens}")
