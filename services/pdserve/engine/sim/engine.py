"""A simulated engine: real blocks, real memory, a real connector and no model.

One task runs the steps: `stepping.py`.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Self

import structlog

from pdserve.engine.handoff.scheduler import SchedulerHandoff
from pdserve.engine.port import EngineInfo, Load, Output, Request
from pdserve.engine.sim.answer import Answer
from pdserve.engine.sim.checks import check_request
from pdserve.engine.sim.config import EOS, VOCAB_SIZE, SimConfig
from pdserve.engine.sim.kv import Kv
from pdserve.engine.sim.layout import layout_of
from pdserve.engine.sim.links import SimLinks
from pdserve.engine.sim.memory import SimMemory
from pdserve.engine.sim.requests import SimRequest
from pdserve.engine.sim.scheduler import SimScheduler
from pdserve.engine.sim.stepping import Item, Sleep, Stepping
from pdserve.kvd.reshard import described
from pdserve.rpc.errors import (
    EngineDied,
    InvalidRequest,
    KvdUnavailable,
    PdserveError,
)
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

_LONGEST_PAUSE_S = 0.5


class SimEngine:
    """Implements pdserve.engine.port.Engine; make one with `start`."""

    def __init__(self, config: SimConfig, engine_id: str, kvd_socket: str | None, clock: Clock, sleep: Sleep) -> None:
        self._config = config
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
        self._wake = asyncio.Event()
        self._links: SimLinks | None = None
        handoff: SchedulerHandoff | None = None
        if kvd_socket is not None:
            self._links = SimLinks(
                kvd_socket, self._info, self._kv.regions(), config.layers, config.fence_timeout, self._wake.set
            )
            handoff = SchedulerHandoff(self._links, config.block_size, clock, lambda end: self._stepping.remember(end))
        self._scheduler = SimScheduler(config, handoff)
        self._stepping = Stepping(config, self._kv, self._scheduler, self._links, clock, sleep, self._put)
        self._queues: dict[str, asyncio.Queue[Item]] = {}
        self._request_ids: set[str] = set()
        self._arrived: deque[SimRequest] = deque()
        self._given_up: deque[SimRequest] = deque()
        self._numbers = itertools.count()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

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
        engine = cls(config, str(uuid.uuid4()), kvd_socket, clock or Clock(), sleep)
        try:
            if engine._links is not None:
                await engine._links.start(timeout)
        except BaseException:
            await engine.aclose()
            raise
        engine._task = asyncio.create_task(engine._run(), name=f"sim-engine-{engine._info.engine_id[:8]}")
        return engine

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
            steps=self._stepping.count,
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
    def corrupt(self) -> int:
        """Requests in whose KV a byte was wrong; a test that has arranged for that sets it back."""
        return self._stepping.corrupt

    @corrupt.setter
    def corrupt(self, count: int) -> None:
        self._stepping.corrupt = count

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

    def _put(self, sim: SimRequest, item: Item) -> None:
        if (queue := self._queues.get(sim.handle)) is not None:
            queue.put_nowait(item)

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
                else:
                    self._wake.clear()
                    if await self._stepping.step() == 0:
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

    def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(reason)
        for queue in self._queues.values():
            queue.put_nowait(EngineDied(reason))
