"""Bugs that are put into a fleet's processes to see the matrix find them; never in the product.

Each is one a maintainer could make; the cells named with it must then fail, and with that finding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdserve.engine.handoff.plan import ScheduledChunk, StepPlan
from pdserve.engine.handoff.scheduler import SchedulerHandoff
from pdserve.kvd.alarm import Alarm
from pdserve.kvd.client.aio import AsyncAttachment
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import ConsumerEnd, Transfer
from pdserve.kvd.pairing import Pairing
from pdserve.kvd.transfers import Transfers
from tests.matrix.cells import Cell
from tests.matrix.faults import Fault
from tests.matrix.phases import Phase


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug."""

    plant: Callable[[], None]
    """Puts it into this process, before its program starts."""
    cells: tuple[Cell, ...]
    """Of which one at least must fail."""
    finding: str
    """Part of what the failure says."""


def _cancel_forgotten() -> None:
    """kvd drops a Cancel: blocks come back when the lease runs out."""

    def cancel(self: Transfers, transfer_id: bytes, reason: str, now: float) -> None:
        pass

    _replace(Transfers, "cancel", cancel)


def _completion_twice() -> None:
    """The connector tells the engine of each completion again in the next step."""
    original = SchedulerHandoff.step

    def step(self: SchedulerHandoff, scheduled: Iterable[ScheduledChunk], preempted: Iterable[str]) -> StepPlan:
        plan = original(self, scheduled, preempted)
        before: StepPlan | None = getattr(self, "_before", None)
        self._before = plan  # type: ignore[attr-defined]  # ours
        if before is None:
            return plan
        sent, received = plan.sent + before.sent, plan.received + before.received
        return msgspec.structs.replace(plan, sent=sent, received=received)

    _replace(SchedulerHandoff, "step", step)


def _freed_before_the_fence() -> None:
    """kvd frees a consumer's blocks although an operation still writes to them."""
    original = Endings.consumer_fenced

    def consumer_fenced(self: Endings, transfer: Transfer, end: ConsumerEnd, now: float) -> None:
        end.ops.clear()
        original(self, transfer, end, now)

    _replace(Endings, "consumer_fenced", consumer_fenced)


def _stale_epoch() -> None:
    """kvd takes a dead engine's epoch for a living one: what it offered stays on offer."""

    def engine_ended(self: Transfers, engine_id: str, detail: str, now: float) -> None:
        pass

    _replace(Transfers, "engine_ended", engine_ended)


def _no_deadline() -> None:
    """A fence waits for its operations for ever."""

    def fence_overdue(self: Endings, transfer: Transfer, consumer: ConsumerEnd | None, now: float) -> None:
        pass

    _replace(Endings, "fence_overdue", fence_overdue)


def _one_rank_for_all() -> None:
    """A consumer has landed when as many bytes are in place as one rank has."""
    original = Pairing._pair

    def _pair(self: Pairing, transfer: Transfer, *ends: Any) -> bool:
        _, consumer, source, *_ = ends
        before = consumer.paired
        fits = original(self, transfer, *ends)
        if fits and not before:
            consumer.missing //= source.ranks
        return fits

    _replace(Pairing, "_pair", _pair)


def _never_said_again() -> None:
    """The connector trusts that no word and no end is ever lost."""

    async def _say_again(self: AsyncAttachment, seconds: float) -> None:
        pass

    _replace(AsyncAttachment, "_say_again", _say_again)


def _time_goes_on() -> None:
    """kvd holds the time that it was stopped against those who were waiting for it."""

    def heard(self: Alarm) -> float:
        return self._now()

    _replace(Alarm, "heard", heard)


def _replace(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, value)


PLANTED: Final = {
    "a release forgotten on cancel": Planted(
        _cancel_forgotten, (Cell(Phase.BETWEEN, Fault.CANCEL, "read"),), "deadlines ran out: ['lease']"
    ),
    "a completion delivered twice": Planted(
        _completion_twice, (Cell(Phase.REGISTERED, Fault.NONE, "read"),), "was completed while"
    ),
    "a free before the fence": Planted(
        _freed_before_the_fence, (Cell(Phase.POSTED, Fault.CANCEL, "read"),), "released under 1 operations"
    ),
    "a stale epoch accepted": Planted(
        _stale_epoch, (Cell(Phase.DONE, Fault.P_KILLED, "read"),), "kvd has not noticed that prefill-"
    ),
    "a wait without deadline": Planted(
        _no_deadline, (Cell(Phase.COMPUTING, Fault.LINK_HANGS, "read"),), "fencing since"
    ),
    "a lost end never asked for": Planted(
        _never_said_again, (Cell(Phase.DONE, Fault.P_END_DROPPED, "read"),), "160 KV tokens"
    ),
    "a standstill held against others": Planted(
        _time_goes_on, (Cell(Phase.WAITING, Fault.KVD_STOPPED, "read"),), "attempts failed for ['TRANSFER_EXPIRED']"
    ),
    "one rank's end taken for the transfer's": Planted(
        _one_rank_for_all, (Cell(Phase.POSTED, Fault.NONE, "read"),), "released under 1 operations"
    ),
}
