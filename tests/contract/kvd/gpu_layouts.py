"""What gpu_ipc promises between engines whose KV lies in different ways, for any accelerator; see gpu_suite.

A module that runs it imports every test of it, and has fixtures `gpu`, a Rig, and `daemon`, a Daemon.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd.client import Accept, Begin, Memory, Offer, Outcome
from pdserve.kvd.notices import Chunk
from pdserve.kvd.plan import Planner
from pdserve.kvd.reshard import Match, match
from pdserve.kvd.testing import FakeEngine, KvdAddress, plain_layout
from pdserve.kvd.types import MemoryKind, Mode
from pdserve.rpc.channel import aio_channel
from tests.contract.kvd.gpu_sides import CASES, LAYERS, Bytes, Case, Side
from tests.contract.kvd.gpu_suite import Owned, Rig

Make = Callable[[Sequence[int], int], Owned]
"""See Rig.make."""
WAIT_S = 20.0


@dataclass
class Daemon:
    """A kvd that copies by gpu_ipc, and memory for its engines, as a Rig has it."""

    kvd: KvdAddress
    make: Make
    kind: MemoryKind


def owned(make: Make, side: Side, seed: int) -> list[Owned]:
    """Memory of each rank. Ranks that hold the same heads hold the same bytes."""
    return [make(side.pieces, seed + 2 * side.first(rank)) for rank in range(side.ranks)]


@contextlib.contextmanager
def handed_over(case: Case, src: Sequence[Owned], dst: Sequence[Owned]) -> Iterator[None]:
    """Raises AssertionError unless what is done meanwhile hands over just this."""
    before, targets, beside = _bytes(src), _bytes(dst), _around([*src, *dst])
    yield
    for rank, (have, want) in enumerate(zip(_bytes(dst), case.expected(before, targets), strict=True)):
        assert (have == want).all(), f"destination rank {rank}: {int((have != want).sum())} bytes are wrong"
    assert all((now == then).all() for now, then in zip(_bytes(src), before, strict=True))
    assert _around([*src, *dst]) == beside


def _bytes(ranks: Sequence[Owned]) -> list[Bytes]:
    return [rank.bytes() for rank in ranks]


def _around(ranks: Sequence[Owned]) -> list[bytes]:
    return [rank.around().tobytes() for rank in ranks]


def units(case: Case, pair: Match) -> tuple[list[int], list[int], int]:
    """The blocks that each unit of a case lies in, and the first unit's number, as kvd posts them."""
    first = case.first * pair.dst_units
    end = min(len(case.ours) * pair.src_units, first + len(case.theirs) * pair.dst_units)
    ours = [case.ours[unit // pair.src_units] for unit in range(first, end)]
    return ours, [case.theirs[unit // pair.dst_units - case.first] for unit in range(first, end)], first


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
async def test_each_head_of_each_token_goes_where_it_is_computed_on(gpu: Rig, case: Case) -> None:
    """Each share of a plan over a session of its own, as kvd has it: every rank of the destination holds what it is to
    hold; no byte beside that has changed, nor any of the source's."""
    src, dst = owned(gpu.make, case.src, 1), owned(gpu.make, case.dst, 2)
    regions = [await gpu.take(rank, one) for rank, one in enumerate([*src, *dst])]
    pair, moved = match(case.src.layouts, case.dst.layouts), 0
    ours, theirs, first = units(case, pair)
    with handed_over(case, src, dst):
        for share in pair.shares:
            planner = Planner(case.src.layout(share.src_rank), case.dst.layout(share.dst_rank), share)
            session = await gpu.transport.open(regions[share.src_rank], regions[len(src) + share.dst_rank])
            moved += (await session.start(planner.plan(range(LAYERS), ours, theirs, first)).wait()).nbytes
            await session.close()
    assert moved == case.moved


@pytest.mark.parametrize("mode", Mode)
async def test_a_daemon_hands_over_between_layouts_that_differ(daemon: Daemon, mode: Mode) -> None:
    """kvd pairs the ranks that its engines registered: after LANDED the destination holds just what it is to hold. In
    WRITE all of it goes ahead of the offer, layer by layer."""
    for name, case in CASES.items():
        print(f"case: {name}")
        src, dst = owned(daemon.make, case.src, 1), owned(daemon.make, case.dst, 2)
        with handed_over(case, src, dst):
            await through(daemon, case, mode, src, dst)


async def through(daemon: Daemon, case: Case, mode: Mode, src: Sequence[Owned], dst: Sequence[Owned]) -> None:
    """One hand-over, whose ends are as they should be; in WRITE all of it goes ahead of the offer."""
    async with fake_engine(daemon, case.src, src) as p, fake_engine(daemon, case.dst, dst) as d:
        tid = os.urandom(16)
        offer = Offer("p", tid, 0, case.ours, len(case.ours) * case.src.block_size, mode)
        if mode is Mode.READ:
            p.scheduler.send(offer)
            d.scheduler.send(Accept("d", tid, 0, case.theirs, case.first, ticket=p.ticket(tid)))
        else:
            p.scheduler.send(Begin("p", tid, mode))
            d.scheduler.send(Accept("d", tid, 0, case.theirs, case.first, peer_locator=p.locator()))
            await known(daemon, lambda one: "reserved" in one.consumer_states)
            p.step(1, Chunk("p", 0, 0, case.ours, len(case.ours)), layers=range(LAYERS))
            await known(daemon, lambda one: one.bytes_moved == case.moved)
            p.scheduler.send(offer)
        end = await d.end_of("d", WAIT_S)
        assert (end.outcome, end.facts.transport, end.reason) == (Outcome.LANDED, "gpu_ipc", "")
        assert end.facts.kv_bytes == case.moved
        assert end.facts.overlapped_bytes == (case.moved if mode is Mode.WRITE else 0)
        assert (await p.end_of("p", WAIT_S)).outcome is Outcome.RELEASED


def fake_engine(daemon: Daemon, side: Side, memory: Sequence[Owned]) -> FakeEngine:
    """A side's engine with this memory of its ranks; `async with` starts and ends it."""
    given = [
        Memory(-1, one.size, layout, daemon.kind, one.memory) for one, layout in zip(memory, side.layouts, strict=True)
    ]
    return FakeEngine(daemon.kvd, ranks=side.ranks, layout=plain_layout(1, 1, 16), give=given)


async def known(daemon: Daemon, condition: Callable[[kvd_pb2.Transfer], bool]) -> None:
    """Waits until the daemon's one transfer is so.

    Raises:
        TimeoutError: not in time.
    """
    async with aio_channel(f"unix:{daemon.kvd.socket}") as channel, asyncio.timeout(WAIT_S):
        operator = kvd_pb2_grpc.OperatorStub(channel)
        while True:
            listed = await operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=WAIT_S)
            if len(listed.transfers) == 1 and condition(listed.transfers[0]):
                return
            await asyncio.sleep(0.01)
