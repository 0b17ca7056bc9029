"""What an operator sees of a daemon that holds things, through the command line and over gRPC.

Real are the daemon, its sockets and the command; fake are the engines, and the link, which is slow on purpose.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli.__main__ import main
from pdserve.kvd.client import Accept, Begin, Cancel, Offer, Outcome
from pdserve.kvd.testing import FakeEngine, Fault, kvd_process, running_kvd
from pdserve.kvd.types import Mode
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import Draining
from pdserve.rpc.status import to_error

Says = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """Somebody at a terminal."""

    socket: str
    capsys: pytest.CaptureFixture[str]

    async def run(self, *words: str) -> tuple[int, str]:
        """`pdserve kvd WORDS`: its status and stdout."""
        status = await asyncio.to_thread(main, ["kvd", *words, "--socket", self.socket])
        return status, self.capsys.readouterr().out

    async def json(self, action: str) -> Says:
        """The answer as a program reads it."""
        status, out = await self.run(action, "--json")
        assert status == 0
        said: Says = json.loads(out)
        return said

    async def until(self, action: str, true: Callable[[Says], bool]) -> Says:
        """The first answer for which something is true.

        Raises:
            TimeoutError: none within 10 seconds.
        """
        async with asyncio.timeout(10):
            while True:
                said = await self.json(action)
                if true(said):
                    return said
                await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class World:
    """A daemon process with a slow link, two engines, and an operator."""

    operator: Operator
    p: FakeEngine
    d: FakeEngine


@pytest.fixture
async def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[World]:
    """Every copy takes a minute, and no deadline comes within the test: what is made to happen stays."""
    slow = ("--transport", "sim", "--sim-delay", "60", "--fence", "40", "--tie", "50")
    with structlog.testing.capture_logs():  # the engines' log would mix with what the command prints
        async with _world(tmp_path, capsys, *slow) as made:
            yield made


@contextlib.asynccontextmanager
async def _world(tmp_path: Path, capsys: pytest.CaptureFixture[str], *slow: str) -> AsyncIterator[World]:
    async with (
        kvd_process(tmp_path, *slow) as kvd,
        FakeEngine(kvd, seed=1) as p,
        FakeEngine(kvd, seed=2) as d,
    ):
        yield World(Operator(kvd.socket, capsys), p, d)


def by_id(said: Says) -> dict[str, Says]:
    """Listed transfers by id."""
    return {one["transfer_id"]: one for one in said["transfers"]}


async def test_each_transfer_says_who_holds_it_and_what_it_waits_for(world: World) -> None:
    """Five transfers in five situations: states, engines, handles, bytes and words; the same on the screen."""
    parked, offered, computing, copying, fencing = (os.urandom(16) for _ in range(5))
    p, d, operator = world.p, world.d, world.operator
    d.scheduler.send(Accept("parked", parked, 0, (1,), 0, ticket=p.ticket(parked)))
    p.scheduler.send(Offer("offered", offered, 0, (1, 2), 32, Mode.READ))
    p.scheduler.send(Begin("computing", computing, Mode.WRITE))
    for number, (tid, name) in enumerate(((copying, "copying"), (fencing, "fencing"))):
        p.scheduler.send(Offer(f"p-{name}", tid, 0, (10 + number,), 16, Mode.READ))
        d.scheduler.send(Accept(f"d-{name}", tid, 0, (20 + number,), 0, ticket=p.ticket(tid)))
    await operator.until("transfers", lambda said: [t["operations"] for t in by_id(said).values()].count(1) == 2)
    p.scheduler.send(Cancel(fencing, "CANCELLED"))
    said = by_id(
        await operator.until(
            "transfers",
            lambda said: len(by_id(said)) == 5 and by_id(said)[fencing.hex()]["producer_state"] == "fencing",
        )
    )
    ends = {tid: (one["producer_state"], one["consumer_states"]) for tid, one in said.items()}
    assert ends == {
        parked.hex(): ("none", ["reserved"]),
        offered.hex(): ("complete", []),
        computing.hex(): ("computing", []),
        copying.hex(): ("complete", ["filling"]),
        fencing.hex(): ("fencing", ["fencing"]),
    }
    for tid, words in (
        (parked, "parked: the producer is not known yet, "),
        (offered, "waits for decode's accept, "),
        (computing, "waits for prefill's offer and decode's accept, its lease has "),
        (copying, "copying, 1 operation, "),
        (fencing, "fencing since "),
    ):
        assert said[tid.hex()]["waits_for"].startswith(words), said[tid.hex()]
    assert ": 1 operation in flight, the session is closed in " in said[fencing.hex()]["waits_for"]
    one = said[copying.hex()]
    assert (one["producer_handle"], one["consumer_handles"]) == ("p-copying", ["d-copying"])
    assert (one["producer_engine_id"], one["consumer_engine_ids"]) == (p.engine_id, [d.engine_id])
    assert (one["mode"], one["bytes_moved"], one["bytes_wanted"]) == ("read", 0, 2 * 4096)
    assert [one["reason"] for tid, one in said.items() if tid != fencing.hex()] == [""] * 4
    assert said[fencing.hex()]["reason"] == "CANCELLED"
    status, out = await operator.run("transfers")
    assert status == 0
    for line in ("parked: the producer", "waits for decode's accept", "copying, 1 operation", "[CANCELLED]"):
        assert len([row for row in out.splitlines() if line in row]) == 1, out
    await _leases_and_description(operator, p, d, fencing)


async def _leases_and_description(operator: Operator, p: FakeEngine, d: FakeEngine, fencing: bytes) -> None:
    """Of the same five: the leases behind them, and their sums in describe."""
    leases = (await operator.json("leases"))["leases"]
    assert len(leases) == 7  # a lease an end
    held = [one for one in leases if one["transfer_id"] == fencing.hex()]
    assert [(one["quarantined"], one["expires"], one["in_flight"]) for one in held] == [(True, False, 1)] * 2
    assert all(one["quarantined_seconds"] > 0 for one in held)
    offered = next(one for one in leases if one["block_ids"] == [1, 2])
    assert offered["expires"]
    assert 0 < offered["remaining_seconds"] <= 30
    status, out = await operator.run("leases")
    assert status == 0
    assert any(line.endswith("1-2") for line in out.splitlines()), out
    said = await operator.json("describe")
    region = next(one for one in said["regions"] if one["engine_id"] == p.engine_id)
    counts = [region[name] for name in ("free", "leased", "in_flight", "quarantined", "num_blocks")]
    assert counts == [60, 2, 1, 1, 64]
    assert said["transfers"]["producer.fencing"] == 1
    assert said["fences"]["count"] == 0
    assert said["fences"]["bound_seconds"] == 40
    assert said["uptime_seconds"] > 0
    assert {one["engine_id"] for one in said["engines"]} == {p.engine_id, d.engine_id}
    for engine in said["engines"]:
        kinds = [(m["participant"], m["rank"], m["pid"], m["attached"]) for m in engine["participants"]]
        assert kinds == [("scheduler", 0, os.getpid(), True), ("worker", 0, os.getpid(), True)]
        assert 0 < engine["age_seconds"] <= said["uptime_seconds"]
    status, out = await operator.run("describe")
    assert status == 0
    assert f"scheduler ({os.getpid()}), worker 0 ({os.getpid()})" in out


async def test_a_drain_with_something_left_says_what_and_can_be_undone(world: World) -> None:
    """Status 1 with the open transfer listed; a new one is refused; after --undo a new one is taken."""
    p, operator, tid = world.p, world.operator, os.urandom(16)
    p.scheduler.send(Offer("open", tid, 0, (1,), 16, Mode.READ))
    await operator.until("transfers", lambda said: len(by_id(said)) == 1)
    status, out = await operator.run("drain", "--deadline", "0.1")
    assert status == 1
    assert out.startswith("1 left; the drain goes on, new transfers are refused")
    assert tid.hex()[:8] in out
    assert "waits for decode's accept" in out
    p.scheduler.send(Offer("late", os.urandom(16), 0, (2,), 16, Mode.READ))
    assert (await p.end_of("late")).reason == "KVD_UNAVAILABLE"
    assert (await operator.json("describe"))["draining"]
    assert (await operator.run("drain", "--undo"))[0] == 0
    p.scheduler.send(Offer("later", os.urandom(16), 0, (2,), 16, Mode.READ))
    said = await operator.until("transfers", lambda said: len(by_id(said)) == 2)
    assert {one["producer_handle"] for one in said["transfers"]} == {"open", "later"}


async def test_a_drain_with_nothing_left_is_status_0(world: World) -> None:
    """It waits for the open transfer's end and answers then, long before its deadline."""
    p, operator, tid = world.p, world.operator, os.urandom(16)
    p.scheduler.send(Offer("open", tid, 0, (1,), 16, Mode.READ))
    await operator.until("transfers", lambda said: len(by_id(said)) == 1)
    began = time.monotonic()
    draining = asyncio.create_task(operator.run("drain", "--deadline", "50"))
    async with aio_channel(f"unix:{operator.socket}") as channel, asyncio.timeout(10):
        stub = kvd_pb2_grpc.OperatorStub(channel)
        while True:
            if (await stub.Describe(kvd_pb2.DescribeRequest())).draining:
                break
            await asyncio.sleep(0.02)
    assert not draining.done()
    p.scheduler.send(Cancel(tid, "CANCELLED"))
    assert await draining == (0, "drained: no transfer is open\n")
    assert time.monotonic() - began < 40


async def test_expiries_and_fences_are_counted() -> None:
    """A copy that stalls: its transfer's deadline runs out, its fence passes the bound, the session is torn down."""
    async with (
        running_kvd(transport="sim", transfer=0.2, fence=0.2) as kvd,
        FakeEngine(kvd, seed=1) as p,
        FakeEngine(kvd, seed=2) as d,
        aio_channel(f"unix:{kvd.socket}") as channel,
    ):
        kvd.faults.script.append(Fault.STALL)
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d")).outcome is Outcome.EXPIRED
        assert (await p.end_of("p")).reason == "TRANSFER_EXPIRED"
        said = await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest())
        assert dict(said.expiries) == {"transfer": 1}
        assert (said.fences.count, said.fences.waited, said.fences.torn_down) == (2, 1, 1)
        assert said.fences.longest_seconds >= said.fences.bound_seconds == 0.2
        assert said.defects == 0


async def test_an_undone_drain_answers_those_who_wait_for_it() -> None:
    """Somebody waits for a drain that another undoes: they hear at once that it is over, and what is open."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1) as p, aio_channel(f"unix:{kvd.socket}") as channel:
        p.scheduler.send(Offer("open", os.urandom(16), 0, (1,), 16, Mode.READ))
        await kvd.node.until(lambda: len(kvd.node.leases) == 1, 5)
        stub = kvd_pb2_grpc.OperatorStub(channel)
        waiting = asyncio.create_task(_drain(stub, 50))
        await kvd.node.until(lambda: kvd.node.transfers.draining, 5)
        undone = await stub.Drain(kvd_pb2.DrainRequest(undo=True))
        heard = await asyncio.wait_for(waiting, 5)
        assert (undone.remaining, undone.draining, heard.remaining, heard.draining) == (1, False, 1, False)


async def test_the_drain_of_a_daemon_that_stops_is_not_undone() -> None:
    """The last drain before the end: an undo is refused as DRAINING, and new transfers go on being refused."""
    async with running_kvd() as kvd, aio_channel(f"unix:{kvd.socket}") as channel:
        assert await kvd.node.drained(5, stopping=True) == 0
        with pytest.raises(grpc.RpcError, match="about to stop") as raised:
            await kvd_pb2_grpc.OperatorStub(channel).Drain(kvd_pb2.DrainRequest(undo=True))
        assert isinstance(to_error(raised.value), Draining)
        assert kvd.node.transfers.draining


async def _drain(stub: "kvd_pb2_grpc.OperatorAsyncStub", seconds: float) -> kvd_pb2.DrainResponse:
    return await stub.Drain(kvd_pb2.DrainRequest(deadline_seconds=seconds))
