"""The synchronous client as vLLM's processes use it: threads without a loop, a real kvd, real bytes."""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.engine.handoff.scheduler import ScheduledChunk, SchedulerHandoff, StepPlan
from pdserve.engine.handoff.worker import Completed, WorkerHandoff
from pdserve.engine.port import Consume, Produce
from pdserve.kvd.client import Attachment, Hello, Memory, Participant, Rank
from pdserve.kvd.types import Layout, Locator, Mode, Span
from pdserve.runtime.clock import Clock

BLOCK, BLOCKS, LAYERS = 64, 8, 2
LAYOUT = Layout(4, BLOCKS, tuple((Span(layer * BLOCK * BLOCKS, BLOCK, BLOCK),) for layer in range(LAYERS)))
IDENTITY = {"model": "threads"}
SIZE = BLOCK * BLOCKS * LAYERS


class ThreadedEngine:
    """What a connector has of an engine: both halves on blocking attachments, and memory."""

    def __init__(self, socket: str, name: str) -> None:
        self.name = name
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SIZE)
        self.rank = Rank(name, 0, Memory(self.fd, SIZE, LAYOUT))
        self.scheduler_link = Attachment(socket, Hello(name, Participant.SCHEDULER, IDENTITY))
        self.worker_link = Attachment(socket, Hello(name, Participant.WORKER, IDENTITY), on_welcome=self.rank.welcomed)
        self.worker_link.start(10)
        self.scheduler_link.start(10)
        self.scheduler = SchedulerHandoff(self.scheduler_link, 4, Clock())
        self.worker = WorkerHandoff(self.worker_link, self.rank.notices, name, 0, LAYERS)

    def step(self, *chunks: ScheduledChunk, preempted: Sequence[str] = ()) -> Completed:
        plan: StepPlan = self.scheduler.step(chunks, preempted)
        self.worker.fence(plan)
        self.worker.begin_step(plan)
        for layer in range(LAYERS):
            self.worker.layer_done(layer)
        self.worker.end_step()
        if plan.empty and plan.waiting:
            self.worker.wait(0.002)
        return self.worker.poll()

    def run_until(self, handle: str) -> Completed:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            done = self.step()
            if handle in done.sent | done.received:
                return done
        raise AssertionError(f"{self.name}: {handle} did not end")

    def write(self, layer: int, block: int, byte: int) -> None:
        os.pwrite(self.fd, bytes([byte]) * BLOCK, (layer * BLOCKS + block) * BLOCK)

    def read(self, layer: int, block: int) -> bytes:
        return os.pread(self.fd, BLOCK, (layer * BLOCKS + block) * BLOCK)

    def close(self) -> None:
        self.rank.close()
        self.worker_link.close()
        self.scheduler_link.close()
        os.close(self.fd)


@pytest.mark.parametrize("preempt", [False, True], ids=["straight", "preempted"])
async def test_a_write_hand_over_from_threads(cluster: Any, helpers: Any, preempt: bool) -> None:
    """Begin, chunks layer by layer, a preemption with its fence, offer, accept: the consumer's blocks
    hold the last attempt's bytes, each side is told once."""
    tid = helpers.transfer_id()
    locator = Locator("producer", cluster.kvd.socket, IDENTITY)
    signed = cluster.sign_locator(locator)

    def engines() -> None:
        p, d = ThreadedEngine(cluster.kvd.socket, "producer"), ThreadedEngine(cluster.kvd.socket, "consumer")
        try:
            make, take = Produce(tid, Mode.WRITE), Consume(tid, Mode.WRITE, 0, peer_locator=signed)
            assert d.scheduler.matched("c", take, 10, 0) == (10, True)
            d.scheduler.allocated("c", take, 10, [7, 0, 2], 0, 10)
            d.step()
            blocks = [1, 2, 3]
            for index, block in enumerate(blocks):
                for layer in range(LAYERS):
                    p.write(layer, block, 10 * layer + index + 1)
            p.scheduler.allocated("p", make, 10, blocks, 0, 0)
            p.step(ScheduledChunk("p", blocks, 0, 6))
            if preempt:
                p.step(preempted=["p"])
                blocks = [6, 5, 4]
                for index, block in enumerate(blocks):
                    for layer in range(LAYERS):
                        p.write(layer, block, 100 + 10 * layer + index)
                p.scheduler.allocated("p", make, 10, blocks, 0, 0)
                p.step(ScheduledChunk("p", blocks, 0, 6))
            p.step(ScheduledChunk("p", blocks, 6, 4))
            held, out = p.scheduler.finished("p", make, blocks, 10, True)
            assert held
            assert out is not None
            assert d.run_until("c") == Completed(received=frozenset({"c"}))
            assert p.run_until("p") == Completed(sent=frozenset({"p"}))
            for layer in range(LAYERS):
                got = [d.read(layer, block)[0] for block in (7, 0, 2)]
                assert got == [p.read(layer, block)[0] for block in blocks]
                assert d.read(layer, 1) == bytes(BLOCK)
            assert p.step() == d.step() == Completed()
        finally:
            p.close()
            d.close()

    await asyncio.to_thread(engines)
