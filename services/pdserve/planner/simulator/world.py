"""The event loop: requests come, engines step, KV moves, engines fail and change roles. Pure and deterministic.

Two drivers of one model. Step by step, every step of every engine is an event; that is the reference.
Jumping, a run of equal decode steps is one event, and whatever may change what an engine does next
ends its run with the step under way. Both give the same results to the last bit.

Events of one moment: first what comes from outside, then ends of runs, then beginnings, so that an
engine that begins a step has seen all that came in the same moment.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from pdserve.planner.simulator.engine import Engine
from pdserve.planner.simulator.fleet import (
    EngineDies,
    EngineReturns,
    Fleet,
    Happening,
    Job,
    Mode,
    Role,
    RoleChanges,
)
from pdserve.planner.simulator.links import Flow, Links
from pdserve.planner.simulator.requests import Request
from pdserve.planner.simulator.requests import Sequence as Seq
from pdserve.planner.simulator.routing import Router

_OUTSIDE, _END, _BEGIN = range(3)


class World:
    """One simulation; `run` once."""

    def __init__(
        self,
        fleet: Fleet,
        jobs: Sequence[Job],
        arrivals: Sequence[float],
        concurrency: int | None,
        happenings: Sequence[Happening],
        *,
        jump: bool,
    ) -> None:
        """The arguments are those of `simulate`, and are checked there."""
        self.fleet = fleet
        self.engines = [Engine(role, fleet.spec(role), jump=jump) for role in fleet.roles]
        self.requests = [Request(i, job, at) for i, (job, at) in enumerate(zip(jobs, arrivals, strict=True))]
        self.links = Links(fleet.handover.bandwidth)
        self._tail = fleet.handover.tail_in(fleet.mode)
        self.events = 0
        self.now = 0.0
        self._router = Router(self.engines, fleet.mode, fleet.routing, fleet.headroom)
        self._queue: deque[Request] = deque()
        self._backlog: deque[Request] = deque()
        self._places = math.inf if concurrency is None else concurrency
        self._events: list[tuple[float, int, int, int, Callable[..., None], tuple[object, ...]]] = []
        self._uid = count()
        self._links_version = -1
        for request in self.requests:
            self._at(request.sent, self._due, request)
        for happening in happenings:
            self._at(happening.at, self._happens, happening)

    def run(self) -> None:
        """Until nothing happens any more. Requests that are not done then can never be."""
        events = self._events
        while events:
            self.now, _, _, _, handler, arguments = heapq.heappop(events)
            self.events += 1
            handler(*arguments)

    def _at(self, time: float, handler: Callable[..., None], *arguments: object) -> None:
        uid = next(self._uid)
        heapq.heappush(self._events, (time, _OUTSIDE, uid, uid, handler, arguments))

    # -- clients and proxy ------------------------------------------------------------------

    def _due(self, request: Request) -> None:
        """A client would send, if it may have one more in flight."""
        self._backlog.append(request)
        self._send()

    def _send(self) -> None:
        while self._backlog and self._places > 0:
            self._places -= 1
            request = self._backlog.popleft()
            request.sent = self.now
            self._at(self.now + self.fleet.dispatch, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        self._queue.append(request)
        self._pump()

    def _pump(self) -> None:
        while self._queue:
            request = self._queue[0]
            choice = self._router.choose(request)
            if choice is None:
                return
            self._queue.popleft()
            prefill, request.decode = choice
            hit = min(request.job.hit, request.need - 1)
            if prefill is None:
                request.consumer = Seq(request, request.need, hit)
                self._add(request.decode, request.consumer)
                continue
            request.prefill = prefill
            request.producer = Seq(request, request.need, hit, produces=True)
            self._add(prefill, request.producer)
            if self.fleet.mode is Mode.WRITE:
                self._ask_decode(request, request.attempt)

    def _finish(self, request: Request) -> None:
        request.done = self.now
        request.consumer = None
        self._router.give_back(request)
        if self.fleet.egress:
            self._at(self.now + self.fleet.egress, self._told)
        else:
            self._told()
        self._pump()

    def _told(self) -> None:
        """A client has its last token, and may send another request."""
        self._places += 1
        self._send()

    # -- engines ----------------------------------------------------------------------------

    def _add(self, index: int, sequence: Seq) -> None:
        self.engines[index].add(sequence)
        self._poke(index)

    def _poke(self, index: int) -> None:
        """What the engine does next may have changed."""
        engine = self.engines[index]
        if engine.run is None:
            if engine.alive and not engine.poked:
                engine.poked = True
                heapq.heappush(self._events, (self.now, _BEGIN, index, next(self._uid), self._begin, (index,)))
        elif engine.interrupt(self.now):
            self._schedule_end(index)

    def _schedule_end(self, index: int) -> None:
        engine = self.engines[index]
        run = engine.run
        if run is not None:
            end = (run.ends[run.steps - 1], _END, index, next(self._uid), self._end, (index, engine.version))
            heapq.heappush(self._events, end)

    def _begin(self, index: int) -> None:
        engine = self.engines[index]
        engine.poked = False
        if not engine.alive or engine.run is not None:
            return
        for sequence in engine.begin(index, self.now):
            self._accepted(sequence.request)
        self._schedule_end(index)

    def _end(self, index: int, version: int) -> None:
        engine = self.engines[index]
        if version != engine.version or engine.run is None:
            return
        ended = engine.end(index)
        self._take_role(engine)
        for sequence in ended.produced:
            self._produced(sequence, len(ended.produced))
        for sequence in ended.finished:
            self._finish(sequence.request)
        self._poke(index)

    # -- hand-over --------------------------------------------------------------------------

    def _produced(self, sequence: Seq, together: int) -> None:
        request, handover = sequence.request, self.fleet.handover
        if handover.first_token is Role.PREFILL:
            request.pieces.append(self.now)
            request.made += 1
            if not request.left:
                self._over(request)
                return
        if self.fleet.mode is Mode.READ:
            self._at(self.now + handover.serialization, self._ask_decode, request, request.attempt)
            return
        consumer = request.consumer
        if consumer is not None and consumer.accepted is not None:
            # It was pushed while it was computed, beside the others that are ready now; what the link did
            # not manage, and at least the last layer of the last step, is still to go.
            whole = self._bytes(request)
            since = self.now - max(sequence.begun, consumer.accepted)
            share = handover.bandwidth / together
            unpushed = max(0.0, whole - share * since) if math.isfinite(share) else 0.0
            self._transfer(request, max(unpushed, whole / handover.layers))

    def _over(self, request: Request) -> None:
        """Complete with prefill's token: nothing is handed over."""
        if request.consumer is not None:
            self.engines[request.decode].drop(request.consumer, self.now)
            self._poke(request.decode)
        self._release_producer(request)
        self._finish(request)

    def _ask_decode(self, request: Request, attempt: int) -> None:
        if attempt != request.attempt:
            return
        if self.engines[request.decode].alive:
            request.consumer = Seq(request, request.need, consumes=True)
            self._add(request.decode, request.consumer)
        else:  # it died while the prompt was computed
            self._fail(request)
            self._pump()

    def _accepted(self, request: Request) -> None:
        if request.producer is not None and request.producer.over:
            self._transfer(request, self._bytes(request))

    def _bytes(self, request: Request) -> float:
        return self.fleet.handover.bytes_per_token * (request.need - request.job.decode_hit)

    def _transfer(self, request: Request, left: float) -> None:
        if not left or math.isinf(self.fleet.handover.bandwidth):
            self._at(self.now + self._tail, self._landed, request, request.attempt)
            return
        self.links.add(self.now, Flow(request.index, request.attempt, request.prefill, request.decode, left))
        self._links_changed()

    def _links_changed(self) -> None:
        if self.links.version != self._links_version:
            self._links_version = self.links.version
            at = self.links.next_end()
            if at is not None:
                self._at(max(at, self.now), self._moved, self._links_version)

    def _moved(self, version: int) -> None:
        if version != self.links.version:
            return
        for flow in self.links.ended(self.now):
            request = self.requests[flow.request]
            self._at(self.now + self._tail, self._landed, request, flow.attempt)
        self._links_changed()

    def _landed(self, request: Request, attempt: int) -> None:
        if attempt != request.attempt or request.consumer is None:
            return
        if request.landed is None:
            request.landed = self.now
        self._release_producer(request)
        self.engines[request.decode].land(request.consumer)
        self._poke(request.decode)
        self._pump()

    def _release_producer(self, request: Request) -> None:
        if request.producer is not None:
            self.engines[request.prefill].release(request.producer, self.now)
            self._router.give_back(request, request.prefill)
            request.producer = None
            self._poke(request.prefill)

    # -- what befalls engines ---------------------------------------------------------------

    def _happens(self, happening: Happening) -> None:
        engine = self.engines[happening.engine]
        match happening:
            case EngineDies():
                if engine.alive:
                    lost = sorted({s.request.index for s in engine.die(happening.engine, self.now)})
                    for index in reversed(lost):  # the oldest comes first in the queue
                        self._fail(self.requests[index])
            case EngineReturns():
                engine.alive = True
            case RoleChanges(role=role):
                engine.role = role
                if engine.run is None:
                    self._take_role(engine)
                else:
                    self._poke(happening.engine)
        self._pump()

    def _take_role(self, engine: Engine) -> None:
        """Speed and budgets are the role's, between two runs; the memory stays what it was."""
        if engine.acts_as is not engine.role:
            engine.acts_as = engine.role
            engine.spec = replace(self.fleet.spec(engine.role), kv_tokens=engine.spec.kv_tokens)

    def _fail(self, request: Request) -> None:
        """Tries again elsewhere; what the client has of the answer is kept, and computed as prompt."""
        request.attempt += 1
        for index, sequence in ((request.prefill, request.producer), (request.decode, request.consumer)):
            # What a dead engine held is gone already; its own sequences are over.
            if sequence is not None and self.engines[index].alive:
                self.engines[index].drop(sequence, self.now)
                self._poke(index)
        request.producer = request.consumer = None
        self.links.drop(self.now, request.index)
        self._links_changed()
        self._router.give_back(request)
        self._queue.appendleft(request)
