"""Random requests, aborts, preemptions and ends: the hand-over under a scheduler that asserts what
vLLM's asserts, and a model of kvd that knows who may touch which block."""

import itertools
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.engine.handoff.scheduler import SchedulerHandoff
from pdserve.engine.handoff.worker import WorkerHandoff
from pdserve.engine.port import Consume, Produce, Request, Sampling
from pdserve.engine.sim.answer import Answer
from pdserve.engine.sim.config import SimConfig
from pdserve.engine.sim.requests import SimRequest, Status
from pdserve.engine.sim.scheduler import SimScheduler
from pdserve.kvd.client.ledger import Ledger
from pdserve.kvd.client.messages import Accept, Begin, End, Fenced, Offer, Outcome, Retract
from pdserve.kvd.client.messages import Request as Message
from pdserve.kvd.notices import Notice, StepBegin
from pdserve.kvd.types import Mode

CONFIG = SimConfig(num_blocks=8, block_size=4, block_bytes=32, token_budget=8, max_seqs=4)


class ModelKvd:
    """Who holds which blocks, behind the client's own ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger(strict=True)
        self.ends: list[End] = []
        self.opened: dict[str, bytes] = {}
        self.producers: set[str] = set()
        self.held: dict[str, set[int]] = {}
        self.attempt: dict[str, int] = {}
        self.fencing: set[tuple[str, int]] = set()
        self.ended: set[str] = set()

    # SchedulerLink
    def send(self, message: Message) -> None:
        if self.ledger.sending(message):
            self._hear(message)

    def drain_ends(self) -> list[End]:
        ends, self.ends = self.ends, []
        self.ledger.drained(end.handle for end in ends)
        return ends

    # NoticeSink
    def hear_notice(self, notice: Notice) -> None:
        if isinstance(notice, StepBegin):
            for chunk in notice.chunks:
                if chunk.handle in self.held:
                    assert chunk.attempt == self.attempt[chunk.handle]
                    assert len(self.held[chunk.handle]) == chunk.first_block
                    self.held[chunk.handle] |= set(chunk.block_ids)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Begin | Offer):
            if message.handle not in self.held:
                assert message.handle not in self.opened, "a handle is begun once"
                self._open(message.handle, message.transfer_id, producer=True)
            if isinstance(message, Offer):
                assert message.attempt == self.attempt[message.handle]
                known = self.held[message.handle]
                assert known <= set(message.block_ids)
                self.held[message.handle] = set(message.block_ids)
        elif isinstance(message, Accept):
            assert message.handle not in self.opened, "a transfer is accepted once"
            for other, blocks in self.held.items():
                assert not blocks & set(message.block_ids), f"blocks of {other} are given away"
            self._open(message.handle, message.transfer_id, producer=False)
            self.held[message.handle] = set(message.block_ids)
        elif isinstance(message, Retract) and not message.final:
            self.fencing.add((message.handle, message.attempt))

    def _open(self, handle: str, transfer_id: bytes, producer: bool) -> None:
        self.opened[handle] = transfer_id
        self.held[handle] = set()
        self.attempt[handle] = 0
        if producer:
            self.producers.add(handle)

    def fence(self, handle: str, attempt: int) -> None:
        self.fencing.discard((handle, attempt))
        if handle in self.held:
            self.held[handle] = set()
            self.attempt[handle] = attempt + 1
        for message in self.ledger.fenced(Fenced(handle, attempt)):
            self._hear(message)

    def end(self, handle: str, outcome: Outcome) -> None:
        for key in [k for k in self.fencing if k[0] == handle]:
            self.fence(*key)
        del self.held[handle]
        self.ended.add(handle)
        end = End(handle, self.opened[handle], outcome, "" if outcome.good else "PEER_LOST")
        assert self.ledger.ended(end)
        self.ends.append(end)

    @property
    def open(self) -> list[str]:
        return sorted(self.held)


class Sink:
    def __init__(self, kvd: ModelKvd) -> None:
        self._kvd = kvd

    def send(self, notice: Notice) -> bool:
        self._kvd.hear_notice(notice)
        return True


class Clock:
    def monotonic_ns(self) -> int:
        return 0


class HandoffMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize()
    def build(self) -> None:
        self.kvd = ModelKvd()
        self.scheduler = SimScheduler(CONFIG, SchedulerHandoff(self.kvd, CONFIG.block_size, Clock()))
        self.worker = WorkerHandoff(None, Sink(self.kvd), "engine", 0, CONFIG.layers)
        self.numbers = itertools.count()
        self.awaited: set[str] = set()

    def add(self, kv: Produce | Consume | None, prompt: Iterable[int], tokens: int) -> None:
        prompt = tuple(prompt)
        request = Request(str(next(self.numbers)), prompt, Sampling(max_tokens=tokens, temperature=0), kv)
        most = min(tokens, CONFIG.context - len(prompt))
        self.scheduler.add(SimRequest.make(request.request_id, request, Answer(request.sampling, most, 0)))

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)

    @rule(prompt=prompts, tokens=st.integers(1, 12))
    def plain(self, prompt: list[int], tokens: int) -> None:
        self.add(None, prompt, tokens)

    @rule(prompt=prompts, mode=st.sampled_from(Mode), tokens=st.sampled_from([1, 1, 1, 9]))
    def produce(self, prompt: list[int], mode: Mode, tokens: int) -> None:
        self.add(Produce(next(self.numbers).to_bytes(16), mode), prompt, tokens)

    @rule(prompt=prompts, tokens=st.integers(1, 12))
    def consume(self, prompt: list[int], tokens: int) -> None:
        tid = next(self.numbers).to_bytes(16)
        self.add(Consume(tid, Mode.READ, 0, ticket=b"t", recompute=True), prompt, tokens)

    @rule()
    def step(self) -> None:
        """One round, in vLLM's order: fence, begin, layers, end, completions."""
        step = self.scheduler.schedule()
        for fence in step.plan.fences:
            self.kvd.fence(fence.handle, fence.attempt)
        assert not self.kvd.fencing, "a retraction that no worker waits for"
        written = {block for w in step.work for block in self._written(w.request, w.start, w.count)}
        for handle, blocks in self.kvd.held.items():
            request = self.scheduler.requests.get(handle)
            if request is None or request.status is Status.FINISHED or handle not in self.kvd.producers:
                assert not written & blocks, f"the step writes blocks that kvd may touch for {handle}"
        self.worker.begin_step(step.plan)
        for layer in range(CONFIG.layers):
            self.worker.layer_done(layer)
        self.worker.end_step()
        for request in self.scheduler.computed(step):
            piece = request.answer.add(int(request.raws[len(request.tokens) - 1]))
            if piece.finish is None:
                request.append(piece.token_id)
            else:
                self.scheduler.finish(request, by_length=True)
        sent, _ = self.scheduler.completed(self.worker.poll())
        self.scheduler.release(sent)

    def _written(self, request: SimRequest, start: int, count: int) -> set[int]:
        size = CONFIG.block_size
        return {request.block_ids[p // size] for p in range(start, start + count)}

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish(self.scheduler.requests[handle], by_length=False)

    @precondition(lambda self: self.kvd.open)
    @rule(data=st.data(), outcome=st.sampled_from([None, None, *(o for o in Outcome if not o.good)]))
    def end(self, data: st.DataObject, outcome: Outcome | None) -> None:
        handle = data.draw(st.sampled_from(self.kvd.open))
        good = Outcome.RELEASED if handle in self.kvd.producers else Outcome.LANDED
        self.kvd.end(handle, outcome or good)

    @invariant()
    def pool_adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        """Once every handle has ended and every request is aborted, all blocks are free."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2):
            for request in list(self.scheduler.requests.values()):
                self.scheduler.finish(request, by_length=False)
            for handle in self.kvd.open:
                self.kvd.end(handle, Outcome.CANCELLED)
            self.step()
        assert not self.scheduler.requests
        assert self.scheduler.pool.free == CONFIG.num_blocks
        assert set(self.kvd.opened) == self.kvd.ended


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
