"""A simulated engine's attachments: one as scheduler, one per rank, all on the engine's loop."""

import asyncio
from collections.abc import Callable, Sequence

from pdserve.engine.handoff.scheduler import StepPlan
from pdserve.engine.handoff.worker import Completed, WorkerHandoff, fence_timed_out
from pdserve.engine.port import EngineInfo
from pdserve.kvd.client.aio import AsyncAttachment
from pdserve.kvd.client.messages import End, Hello, Participant, Request
from pdserve.kvd.client.rank import Memory, Rank


class SimLinks:
    """Is a handoff.SchedulerLink, and drives every rank's WorkerHandoff."""

    def __init__(
        self,
        socket: str,
        info: EngineInfo,
        memories: Sequence[Memory],
        layers: int,
        fence_timeout: float,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when an end has come."""
        self._wake = wake
        self._fence_timeout = fence_timeout
        self._ends: list[End] = []
        scheduler = Hello(info.engine_id, Participant.SCHEDULER, info.identity, info.ranks)
        self._scheduler = AsyncAttachment(socket, scheduler, on_end=self._ended)
        self._ranks = [Rank(info.engine_id, rank, memory) for rank, memory in enumerate(memories)]
        self._workers = [
            AsyncAttachment(
                socket,
                Hello(info.engine_id, Participant.WORKER, info.identity, info.ranks, index),
                on_end=lambda end: None,  # the scheduler's is the one that counts
                on_welcome=rank.welcomed,
            )
            for index, rank in enumerate(self._ranks)
        ]
        self._handoffs = [
            WorkerHandoff(None, rank.notices, info.engine_id, index, layers) for index, rank in enumerate(self._ranks)
        ]

    async def start(self, timeout: float) -> None:
        """Attaches all; raises as AsyncAttachment.start."""
        for attachment in (*self._workers, self._scheduler):
            await attachment.start(timeout)

    def send(self, message: Request) -> None:
        """See SchedulerLink."""
        self._scheduler.send(message)

    def drain_ends(self) -> list[End]:
        """See SchedulerLink."""
        ends, self._ends = self._ends, []
        self._scheduler.forget(end.handle for end in ends)
        return ends

    async def begin(self, plan: StepPlan) -> None:
        """Fences what the plan says and announces its chunks.

        Raises:
            EngineDied: no fence in time; the step must not run.
        """
        for fence in plan.fences:
            waits = (w.wait_fenced(fence.handle, fence.attempt, self._fence_timeout) for w in self._workers)
            if not all(await asyncio.gather(*waits)):
                raise fence_timed_out(fence, self._fence_timeout)
        for handoff in self._handoffs:
            handoff.begin_step(plan)

    @property
    def announcing(self) -> bool:
        """Whether this step's layers are to be told of."""
        return any(handoff.announcing for handoff in self._handoffs)

    def layer_done(self, layer: int) -> None:
        """The layer is in memory on every rank."""
        for handoff in self._handoffs:
            handoff.layer_done(layer)

    def end(self) -> Completed:
        """The step is done: what is over, the same for every rank."""
        for handoff in self._handoffs:
            handoff.end_step()
        first, *others = [handoff.poll() for handoff in self._handoffs]
        assert all(other == first for other in others), "ranks disagree on what is over"
        return first

    async def aclose(self) -> None:
        """Ends the ranks, then the streams. Safe twice."""
        for rank in self._ranks:
            rank.close()
        await asyncio.gather(*(attachment.aclose() for attachment in (*self._workers, self._scheduler)))

    def _ended(self, end: End) -> None:
        self._ends.append(end)
        self._wake()
