"""A rank's half of the connector: tells kvd of each layer, fences before a step overwrites, and
hands the engine what the scheduler's plan says is over.

One instance per rank, called by the thread that runs the steps, in this order:

    fence(plan)  begin_step(plan)  layer_done(0) .. layer_done(n-1)  end_step()  poll()

Which ends the engine hears, and that it hears each once, is decided by the scheduler's half: every
rank gets the same plan in the same step, so all ranks report together.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.engine.handoff.plan import Fence, StepPlan
from pdserve.kvd.client.messages import End
from pdserve.kvd.notices import LayerReady, Notice, StepBegin, StepEnd
from pdserve.rpc.errors import EngineDied

FENCE_TIMEOUT_S: Final = 10.0
"""Twice kvd's own deadline for a fence (5 s), after which kvd tears the session down."""


class WorkerLink(Protocol):
    """A worker's way to kvd; `kvd.client.Attachment` is such."""

    @property
    def ends_available(self) -> threading.Event:
        """Set when an end has come; `drain_ends` clears it."""
        ...

    def drain_ends(self) -> Sequence[End]:
        """The ends since the last call."""
        ...

    def wait_fenced(self, handle: str, attempt: int, timeout: float) -> bool:
        """Whether nothing of the attempt is or will be in flight; False after `timeout` seconds."""
        ...


class NoticeSink(Protocol):
    """Where notices go; `kvd.client.NoticeSender` is such."""

    def send(self, notice: Notice) -> bool:
        """Never blocks; False where the notice was dropped."""
        ...


@dataclass(frozen=True, slots=True)
class Completed:
    """What is over since the last poll, by handle; each handle once."""

    sent: frozenset[str] = frozenset()
    """Producers whose blocks may be freed."""
    received: frozenset[str] = frozenset()
    """Consumers whose hand-over is over."""
    failed: frozenset[str] = frozenset()
    """Those of `received` whose bytes are not all there."""


_NOTHING = Completed()


def fence_timed_out(fence: Fence, seconds: float) -> EngineDied:
    """The error of a fence that did not come: the engine ends rather than overwrite blocks that
    may still be read."""
    return EngineDied(
        f"kvd did not fence attempt {fence.attempt} of {fence.handle} within {seconds:g} s; "
        "the step would overwrite blocks that may be in flight",
        handle=fence.handle,
        attempt=str(fence.attempt),
    )


class WorkerHandoff:
    """See the module."""

    def __init__(
        self,
        link: WorkerLink | None,
        notices: NoticeSink,
        engine_id: str,
        rank: int,
        layers: int,
        fence_timeout: float = FENCE_TIMEOUT_S,
    ) -> None:
        """`link` may be None where the caller fences by itself (an asyncio engine)."""
        self._link = link
        self._notices = notices
        self._engine_id = engine_id
        self._rank = rank
        self._layers = layers
        self._fence_timeout = fence_timeout
        self._announced_step: int | None = None
        self._sent: list[str] = []
        self._received: list[str] = []
        self._failed: list[str] = []

    def fence(self, plan: StepPlan) -> None:
        """Waits until nothing reads the preempted attempts; at once where there are none.

        Raises:
            EngineDied: no fence in time. The step must not run.
        """
        if not plan.fences:
            return
        if self._link is None:
            raise EngineDied("a worker without a link to kvd cannot fence")
        for fence in plan.fences:
            if not self._link.wait_fenced(fence.handle, fence.attempt, self._fence_timeout):
                raise fence_timed_out(fence, self._fence_timeout)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the first layer; takes what the plan says is over and announces its chunks."""
        self._sent += plan.sent
        self._received += plan.received
        self._failed += plan.failed
        if self._link is not None and (plan.sent or plan.received):
            self._link.drain_ends()  # the plan has said what they say
        self._announced_step = None
        if plan.chunks:
            self._announced_step = plan.step
            self._notices.send(StepBegin(self._engine_id, self._rank, plan.step, plan.chunks))

    @property
    def announcing(self) -> bool:
        """Whether the step has chunks of which `layer_done` would tell."""
        return self._announced_step is not None

    def layer_done(self, layer: int) -> None:
        """The KV of this step's tokens in layer `layer` is in memory."""
        if self._announced_step is not None and 0 <= layer < self._layers:
            self._notices.send(LayerReady(self._engine_id, self._rank, self._announced_step, layer))

    def end_step(self) -> None:
        """The KV of this step's tokens is in memory in every layer."""
        if self._announced_step is not None:
            self._notices.send(StepEnd(self._engine_id, self._rank, self._announced_step))
            self._announced_step = None

    def poll(self) -> Completed:
        """What is over since the last poll; the engine must be told."""
        if not (self._sent or self._received):
            return _NOTHING
        done = Completed(frozenset(self._sent), frozenset(self._received), frozenset(self._failed))
        self._sent, self._received, self._failed = [], [], []
        return done

    def wait(self, seconds: float) -> None:
        """For a step without work while handles wait for their end (`plan.waiting`): returns when
        one has come, or after `seconds`. The end itself arrives with the next plan."""
        if self._link is not None and self._link.ends_available.wait(seconds):
            self._link.drain_ends()
