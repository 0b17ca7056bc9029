"""A simulated engine: real blocks, real memory, a real connector and no model.

One task runs the steps. A step's time comes from the cost model; in a step that announces chunks
the layers are computed one after another, each at its share of that time. Every request's KV is
checked word by word before a consumer's first step, when it ends, and when a producer's blocks are
released: a byte that is not what the prompt says ends the request with an error and is counted.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

import structlog

from pdserve.engine.ends import error_of
from pdserve.engine.handoff.scheduler import SchedulerHandoff
from pdserve.engine.handoff.worker import Completed
from pdserve.engine.port import EngineInfo, EngineTimes, Load, Output, Request
from pdserve.engine.sim.answer import Answer, Piece
from pdserve.engine.sim.checks import check_request
from pdserve.engine.sim.config import EOS, VOCAB_SIZE, SimConfig
from pdserve.engine.sim.kv import Kv
from pdserve.engine.sim.layout import layout_of
from pdserve.engine.sim.links import SimLinks
from pdserve.engine.sim.memory import SimMemory
from pdserve.engine.sim.requests import SimRequest, Status
from pdserve.engine.sim.scheduler import SimScheduler, Step
from pdserve.kvd.client.messages import End
from pdserve.kvd.reshard import described
from pdserve.rpc.errors import (
    EngineDied,
    InvalidRequest,
    KvdUnavailable,
    PdserveError,
    TransferFailed,
)
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

_LONGEST_PAUSE_S = 0.5

Sleep = Callable[[float], Awaitable[None]]
_Item = Output | PdserveError


class SimEngine:
    """Implements pdserve.engine.port.Engine; make one with `start`."""

    def __init__(self, config: SimConfig, engine_id: str, clock: Clock, sleep: Sleep) -> None:
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._kv = Kv(config)
        self._info = EngineInfo(
            engine_id=engine_id,
            model=config.model,
            tokenizer="bytes",
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            ranks=config.ranks,
            identity=config.identity(),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            layout=described(layout_of(config, 0), config.ranks),
        )
        self._links: SimLinks | None = None
        self._scheduler = SimScheduler(config, None)
        self._queues: dict[str, asyncio.Queue[_Item]] = {}
        self._request_ids: set[str] = set()
        self._arrived: deque[SimRequest] = deque()
        self._given_up: deque[SimRequest] = deque()
        self._bad_ends: dict[str, End] = {}
        self._wake = asyncio.Event()
        self._numbers = itertools.count()
        self._steps = 0
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.corrupt = 0
        """Requests in whose KV a byte was wrong."""

    @classmethod
    async def start(
        cls,
        config: SimConfig,
        kvd_socket: str | None = None,
        *,
        clock: Clock | None = None,
        sleep: Sleep = asyncio.sleep,
        timeout: float = 10.0,
    ) -> Self:
        """A running engine, attached to the kvd at `kvd_socket` (None: alone, no hand-overs).

        Raises:
            KvdUnavailable: no kvd within `timeout` seconds.
            PdserveError: kvd refused the engine; its own class.
        """
        engine = cls(config, str(uuid.uuid4()), clock or Clock(), sleep)
        try:
            if kvd_socket is not None:
                await engine._attach(kvd_socket, timeout)
        except BaseException:
            await engine.aclose()
            raise
        engine._task = asyncio.create_task(engine._run(), name=f"sim-engine-{engine._info.engine_id[:8]}")
        return engine

    async def _attach(self, socket: str, timeout: float) -> None:
        links = self._links = SimLinks(
            socket,
            self._info,
            self._kv.regions(),
            self._config.layers,
            self._config.fence_timeout,
            self._wake.set,
        )
        handoff = SchedulerHandoff(links, self._config.block_size, self._clock, self._remember)
        self._scheduler = SimScheduler(self._config, handoff)
        await links.start(timeout)

    # -- the port ---------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Fixed facts."""
        return self._info

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See port.Engine."""
        sim = self._accept(request)
        queue = self._queues[sim.handle] = asyncio.Queue()
        self._request_ids.add(request.request_id)
        self._arrived.append(sim)
        self._wake.set()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, PdserveError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            del self._queues[sim.handle]
            self._request_ids.discard(request.request_id)
            self._given_up.append(sim)  # a finished one is left as it is
            self._wake.set()

    def load(self) -> Load:
        """See port.Engine."""
        scheduler = self._scheduler
        return Load(
            free_kv_tokens=scheduler.pool.free * self._config.block_size,
            total_kv_tokens=self._config.num_blocks * self._config.block_size,
            running=len(scheduler.running),
            waiting=scheduler.waiting_count + len(self._arrived),
            steps=self._steps,
        )

    async def failed(self) -> str:
        """See port.Engine."""
        return await asyncio.shield(self._dead)

    async def aclose(self) -> None:
        """Ends the engine as `kill` does, but in order: kvd hears that it goes. Safe twice."""
        await self.kill("the engine was closed")

    # -- for tests and operators ------------------------------------------------------------

    @property
    def preemptions(self) -> int:
        """Requests that lost their blocks so far."""
        return self._scheduler.preemptions

    @property
    def idle(self) -> bool:
        """No request exists, not even one whose blocks a hand-over holds."""
        return not (self._scheduler.has_requests or self._arrived)

    def integrity(self) -> None:
        """Raises PdserveError unless free + held = total; run by itself whenever idle."""
        self._scheduler.check()

    def memory(self, rank: int = 0) -> SimMemory:
        """A rank's memory, for tests that scribble on it."""
        return self._kv.memories[rank]

    async def kill(self, reason: str) -> None:
        """Ends the engine at once, as the death of its process would: open requests fail with
        EngineDied, the memory's connection ends. Safe twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # its failure has been told to all
        self._die(reason)
        links, self._links = self._links, None
        if links is not None:
            await links.aclose()
        self._kv.close()

    # -- requests ---------------------------------------------------------------------------

    def _accept(self, request: Request) -> SimRequest:
        config = self._config
        if self._dead.done():
            raise EngineDied(self._dead.result())
        check_request(config, request)
        if request.request_id in self._request_ids:
            raise InvalidRequest(f"request {request.request_id} is being served already")
        if request.kv is not None and self._links is None:
            raise KvdUnavailable("this engine has no kvd to hand KV over with")
        most = min(request.sampling.max_tokens or config.context, config.context - len(request.prompt))
        answer = Answer(request.sampling, most, config.eos_every)
        return SimRequest.make(f"{request.request_id}-{next(self._numbers)}", request, answer)

    def _put(self, sim: SimRequest, item: _Item) -> None:
        if (queue := self._queues.get(sim.handle)) is not None:
            queue.put_nowait(item)

    def _remember(self, end: End) -> None:
        sim = self._scheduler.requests.get(end.handle)
        if not end.outcome.good and sim is not None and sim.status is Status.WAITING_FOR_REMOTE:
            self._bad_ends[end.handle] = end

    # -- steps ------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                if self._arrived:
                    await failpoint(Point.SIM_ARRIVED)
                self._take_arrivals()
                if not self._scheduler.has_requests:
                    self.integrity()
                    await self._wait()
                elif await self._step() == 0:
                    await self._wait()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("sim.engine_died", engine_id=self._info.engine_id)
            self._die(f"{type(error).__name__}: {error}")

    async def _wait(self) -> None:
        """Until something arrives, is given up, or ends at kvd. While anything is awaited at all a
        step is tried now and then, which also shows that the engine lives."""
        if not (self._arrived or self._given_up):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_PAUSE_S if self._scheduler.has_requests else None):
                    await self._wake.wait()
        self._wake.clear()

    def _take_arrivals(self) -> None:
        while self._arrived:
            self._scheduler.add(self._arrived.popleft())
        while self._given_up:
            sim = self._given_up.popleft()
            if sim.handle in self._scheduler.requests:
                self._scheduler.finish(sim, by_length=False)

    async def _step(self) -> int:
        """One scheduling round and what it computes. Returns the number of things that moved."""
        self._wake.clear()
        preemptions = self._scheduler.preemptions
        step = self._scheduler.schedule()
        moved = len(step.work) + self._scheduler.preemptions - preemptions
        if self._links is not None:
            await self._links.begin(step.plan)
        step = self._check_landed(step)
        self._steps += 1
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

    # -- what the hand-over says ------------------------------------------------------------

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

    # -- checks -----------------------------------------------------------------------------

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

    def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(reason)
        for queue in self._queues.values():
            queue.put_nowait(EngineDied(reason))
