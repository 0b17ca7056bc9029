"""The worker's half: fences before it writes, tells layer by layer, reports each handle once."""

import threading

import pytest

from pdserve.engine.handoff.scheduler import Fence, StepPlan
from pdserve.engine.handoff.worker import Completed, WorkerHandoff
from pdserve.kvd.client.messages import End, Outcome
from pdserve.kvd.notices import Chunk, LayerReady, Notice, StepBegin, StepEnd
from pdserve.rpc.errors import EngineDied

CHUNK = Chunk("p", 0, 0, (5,), 1)


class Link:
    """Fences only what the test lists."""

    def __init__(self, *fenced: tuple[str, int]) -> None:
        self.fenced = set(fenced)
        self.asked: list[tuple[str, int, float]] = []
        self.ends_available = threading.Event()
        self.ends: list[End] = []

    def drain_ends(self) -> list[End]:
        self.ends_available.clear()
        ends, self.ends = self.ends, []
        return ends

    def wait_fenced(self, handle: str, attempt: int, timeout: float) -> bool:
        self.asked.append((handle, attempt, timeout))
        return (handle, attempt) in self.fenced


class Notices:
    """Takes everything."""

    def __init__(self) -> None:
        self.sent: list[Notice] = []

    def send(self, notice: Notice) -> bool:
        self.sent.append(notice)
        return True


def worker(link: Link, notices: Notices | None = None) -> WorkerHandoff:
    return WorkerHandoff(link, notices or Notices(), "engine", 1, 2, fence_timeout=3.0)


def test_a_steps_chunks_are_told_layer_by_layer() -> None:
    """Begin, each layer in order, end: with engine, rank and the plan's step."""
    notices = Notices()
    half = worker(Link(), notices)
    half.begin_step(StepPlan(9, (CHUNK,)))
    assert half.announcing
    half.layer_done(0)
    half.layer_done(1)
    half.layer_done(2)  # a draft model's layer is not the region's
    half.end_step()
    half.end_step()
    assert notices.sent == [
        StepBegin("engine", 1, 9, (CHUNK,)),
        LayerReady("engine", 1, 9, 0),
        LayerReady("engine", 1, 9, 1),
        StepEnd("engine", 1, 9),
    ]


def test_a_step_without_chunks_says_nothing() -> None:
    """Decoding costs no notices, also after a step that had chunks."""
    notices = Notices()
    half = worker(Link(), notices)
    half.begin_step(StepPlan(1, (CHUNK,)))
    half.begin_step(StepPlan(2))
    notices.sent.clear()
    half.layer_done(0)
    half.end_step()
    assert notices.sent == []
    assert not half.announcing


def test_the_step_waits_for_its_fences() -> None:
    """Every preempted attempt is waited for, with the deadline."""
    link = Link(("p", 0), ("q", 2))
    worker(link).fence(StepPlan(1, fences=(Fence("p", 0), Fence("q", 2))))
    assert link.asked == [("p", 0, 3.0), ("q", 2, 3.0)]


def test_a_fence_that_does_not_come_ends_the_engine() -> None:
    """Rather than overwrite blocks that may be read, the step raises."""
    with pytest.raises(EngineDied, match="attempt 0 of p within 3 s"):
        worker(Link()).fence(StepPlan(1, fences=(Fence("p", 0),)))


def test_each_handle_is_reported_once() -> None:
    """What several plans said is over comes with the next poll, and never again."""
    half = worker(Link())
    assert half.poll() == Completed()
    half.begin_step(StepPlan(1, sent=("p",)))
    half.begin_step(StepPlan(2, received=("c", "d"), failed=("d",)))
    assert half.poll() == Completed(frozenset({"p"}), frozenset({"c", "d"}), frozenset({"d"}))
    assert half.poll() == Completed()


def test_an_end_wakes_an_idle_worker_and_is_not_kept() -> None:
    """`wait` returns when an end has come; the worker's copies of ends do not pile up."""
    link = Link()
    half = worker(link)
    link.ends.append(End("p", bytes(16), Outcome.RELEASED))
    link.ends_available.set()
    half.wait(30)
    assert link.ends == []
    half.wait(0.001)
    link.ends.append(End("c", bytes(16), Outcome.LANDED))
    half.begin_step(StepPlan(3, received=("c",)))
    assert link.ends == []


def test_ranks_report_together() -> None:
    """The same plan gives every rank the same completions."""
    ranks = [worker(Link()) for _ in range(2)]
    for half in ranks:
        half.begin_step(StepPlan(1, received=("c",)))
    first, second = (half.poll() for half in ranks)
    assert first == second == Completed(received=frozenset({"c"}))
