"""One step of a simulated engine: what is scheduled is computed, sampled and checked; hand-overs that end are taken.

A step's time comes from the cost model; in a step that announces chunks the layers are computed one
after another, each at its share of that time. Every request's KV is checked word by word before a
consumer's first step, when it ends, and when a producer's blocks are released: a byte that is not
what the prompt says ends the request with an error and is counted.
"""

from collections.abc import Awaitable, Callable

import structlog

from pdserve.engine.ends import error_of
from pdserve.engine.handoff.worker import Completed
from pdserve.engine.port import EngineTimes, Output
from pdserve.engine.sim.answer import Piece
from pdserve.engine.sim.config import SimConfig
from pdserve.engine.sim.kv import Kv
from pdserve.engine.sim.links import SimLinks
from pdserve.engine.sim.requests import SimRequest, Status
from pdserve.engine.sim.scheduler import SimScheduler, Step
from pdserve.kvd.client.messages import End
from pdserve.rpc.errors import (
    EngineDied,
    PdserveError,
    TransferFailed,
)
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

Sleep = Callable[[float], Awaitable[None]]
Item = Output | PdserveError


class Stepping:
    """Runs the steps of one engine; `links` None: it is alone."""

    def __init__(
        self,
        config: SimConfig,
        kv: Kv,
        scheduler: SimScheduler,
        links: SimLinks | None,
        clock: Clock,
        sleep: Sleep,
        put: Callable[[SimRequest, Item], None],
    ) -> None:
        """`put`: takes what a request is to be told."""
        self._config = config
        self._kv = kv
        self._scheduler = scheduler
        self._links = links
        self._clock = clock
        self._sleep = sleep
        self._put = put
        self._bad_ends: dict[str, End] = {}
        self.count = 0
        """Steps so far."""
        self.corrupt = 0
        """Requests in whose KV a byte was wrong."""

    def remember(self, end: End) -> None:
        """What kvd said of a hand-over that failed, for its request's error."""
        sim = self._scheduler.requests.get(end.handle)
        if not end.outcome.good and sim is not None and sim.status is Status.WAITING_FOR_REMOTE:
            self._bad_ends[end.handle] = end

    async def step(self) -> int:
        """One scheduling round and what it computes. Returns the number of things that moved."""
        preemptions = self._scheduler.preemptions
        step = self._scheduler.schedule()
        moved = len(step.work) + self._scheduler.preemptions - preemptions
        if self._links is not None:
            await self._links.begin(step.plan)
        step = self._check_landed(step)
        self.count += 1
        if step.work:
            await self._compute(step)
        done = self._links.end() if self._links is not None else Completed()
        for sim in self._scheduler.computed(step):
            self._sample(sim)
        if done.received:
            await failpoint(Point.SIM_LANDED)
        sent, failed = self._scheduler.completed(done)
        self._release(sent)
        self._fail_or_recompute(failed)
        return moved + len(done.sent) + len(done.received)

    def _check_landed(self, step: Step) -> Step:
        """Looks at what peers have filled; drops from the step whose KV is wrong."""
        now = self._clock.monotonic_ns()
        work = []
        for item in step.work:
            sim = item.request
            if not sim.scheduled_ns:
                sim.scheduled_ns = now
            if sim.handed_over:
                sim.handed_over = False
                if not self._verify(sim, sim.prompt_tokens, "before its first step"):
                    continue
            work.append(item)
        return Step(tuple(work), step.plan)

    async def _compute(self, step: Step) -> None:
        await failpoint(Point.SIM_STEP)
        # One token alone costs what a decoded one does, also the last of a prompt after a hand-over.
        prefill = sum(w.count for w in step.work if w.count > 1)
        decoding = [w for w in step.work if w.count == 1]
        seconds = self._config.cost.step_time(prefill, len(decoding), sum(w.start + 1 for w in decoding))
        places = self._kv.places(step)
        layers = range(self._config.layers)
        if self._links is None or not self._links.announcing:
            await self._sleep(seconds)
            for layer in layers:
                self._kv.compute(layer, places)
            return
        begun = self._clock.monotonic()
        for layer in layers:
            # Until the layer is due, not for its share: what sleeping costs would else add up over the layers.
            due = begun + seconds * (layer + 1) / self._config.layers
            await self._sleep(max(0.0, due - self._clock.monotonic()))
            self._kv.compute(layer, places)
            await failpoint(Point.SIM_LAYER)
            self._links.layer_done(layer)

    def _sample(self, sim: SimRequest) -> None:
        if sim.status is Status.FINISHED:
            return
        if not sim.first_token_ns:
            sim.first_token_ns = self._clock.monotonic_ns()
        piece = sim.answer.add(int(sim.raws[len(sim.tokens) - 1]))
        if piece.finish is None:
            sim.append(piece.token_id)
            self._put(sim, self._output(sim, piece, offered=False))
            return
        if not self._verify(sim, sim.computed, "at its end"):
            return
        by_length = piece.finish.value == "length"
        offered = self._scheduler.finish(sim, by_length)
        self._put(sim, self._output(sim, piece, offered))

    def _output(self, sim: SimRequest, piece: Piece, offered: bool) -> Output:
        return Output(
            token_ids=(piece.token_id,),
            text=piece.text,
            logprobs=piece.logprobs,
            finish=piece.finish,
            stop_reason=piece.stop_reason,
            cached_tokens=sim.local_tokens,
            recomputed_tokens=sim.recomputed_tokens,
            offered_tokens=sim.prompt_tokens if offered else 0,
            offered_blocks=-(-sim.prompt_tokens // self._config.block_size) if offered else 0,
            times=EngineTimes(sim.scheduled_ns, sim.first_token_ns),
        )

    def _release(self, sent: list[SimRequest]) -> None:
        for sim in sent:
            self._wrong(sim, sim.computed, "when its blocks were released")
        self._scheduler.release(sent)

    def _fail_or_recompute(self, failed: list[SimRequest]) -> None:
        for sim in failed:
            end = self._bad_ends.pop(sim.handle, None)
            if self._scheduler.recomputes(sim):
                continue
            error = error_of(end) if end is not None else None
            self._scheduler.finish(sim, by_length=False)
            self._put(sim, error or TransferFailed("the hand-over failed"))

    def _verify(self, sim: SimRequest, tokens: int, when: str) -> bool:
        """Ends the request with an error where its KV is wrong."""
        wrong = self._wrong(sim, tokens, when)
        if wrong:
            self._scheduler.finish(sim, by_length=False)
            self._put(sim, EngineDied(f"corrupt KV {when}: {wrong}"))
        return not wrong

    def _wrong(self, sim: SimRequest, tokens: int, when: str) -> str:
        wrong = self._kv.wrong(sim, tokens)
        if wrong:
            self.corrupt += 1
            log.error("sim.corrupt_kv", request_id=sim.request.request_id, when=when, where=wrong)
        return wrong
