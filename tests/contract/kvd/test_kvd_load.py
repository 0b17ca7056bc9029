"""The traffic of `bench --load`, small: what it counts is what happened."""

import asyncio
import json
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvd import bench, bench_load
from pdserve.kvd.bench_daemon import books, usage
from pdserve.kvd.bench_fences import Broken, Fences, fences
from pdserve.kvd.bench_load import Load, load
from pdserve.kvd.bench_traffic import Tally, Traffic
from pdserve.kvd.client import End, Outcome, Participant
from pdserve.kvd.testing import Fault, kvd_process, running_kvd

_MIB = 1 << 20
_SEED = 11


def _end(outcome: Outcome, reason: str = "") -> End:
    return End("d0", b"", outcome, reason)


async def test_nothing_is_lost_and_every_byte_is_there() -> None:
    """Of 60 transfers at a rate and 140 in a closed loop, each has one end for each of four participants
    and at kvd, every byte is compared, and all blocks are free."""
    async with running_kvd() as kvd, Traffic(kvd, total=200, seed=_SEED, sample_every=1) as traffic:
        await traffic.at_rate(60, 400.0)
        await traffic.in_flight(140, 16)
        await traffic.settle()
        seen = await books(kvd.socket)
        assert (traffic.tally.missing, traffic.tally.repeated, traffic.tally.reasons.total()) == (0, 0, 0)
        assert (traffic.verified, traffic.wrong) == (200, 0)
        assert (seen.landed, seen.released, seen.other_ends) == (200, 200, 0)
        assert (seen.open_ends, seen.blocks_held, seen.defects) == (0, 0, 0)
        assert len(traffic.control_ms) == 200
        assert len(traffic.late_ms) == 60


async def test_more_than_the_pools_hold_are_waited_for() -> None:
    """With more in flight allowed than there are blocks, transfers wait for blocks and all of them land."""
    async with running_kvd() as kvd, Traffic(kvd, total=300, seed=_SEED, sample_every=10) as traffic:
        await traffic.in_flight(300, 10_000)
        await traffic.settle()
        assert (traffic.tally.missing, traffic.tally.reasons.total(), traffic.wrong) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fault", "wrong", "reasons"),
    [(Fault.COPY_NOTHING, 1, {}), (Fault.FAIL, 0, {"TRANSFER_FAILED": 4})],
)
async def test_a_broken_link_is_seen(fault: Fault, wrong: int, reasons: dict[str, int]) -> None:
    """A copy that moves nothing is a wrong transfer although it landed; one that fails is no good end,
    and its ends are not missing."""
    async with (
        running_kvd(transport="sim") as kvd,
        Traffic(kvd, total=3, seed=_SEED, sample_every=1) as traffic,
    ):
        kvd.faults.script[:] = [None, fault]
        await traffic.in_flight(3, 1)
        await traffic.settle()
        assert traffic.wrong == wrong
        assert dict(traffic.tally.reasons) == reasons
        assert traffic.tally.missing == 0


async def test_blocks_that_are_held_are_told() -> None:
    """kvd's books name what is not free and not over: an open transfer is no good end of a run."""
    async with running_kvd(transport="sim") as kvd, Traffic(kvd, total=2, seed=_SEED, sample_every=1) as traffic:
        kvd.faults.script[:] = [Fault.STALL]
        await traffic.in_flight(1, 1)
        await kvd.node.until(lambda: bool(kvd.node.transfers.book.ops), 5.0)
        seen = await books(kvd.socket)
        assert (seen.open_ends, seen.blocks_held) == (2, 16)
        assert traffic.tally.missing == 8


async def test_a_transfer_that_landed_is_one_line_of_the_log(tmp_path: Path) -> None:
    """At the level that daemons run with, each transfer is logged once, by its consumer's end."""
    async with kvd_process(tmp_path) as kvd, Traffic(kvd, total=5, seed=_SEED, sample_every=1) as traffic:
        await traffic.in_flight(5, 2)
        await traffic.settle()
        logged = [json.loads(line) for line in (await asyncio.to_thread(kvd.log.read_text)).splitlines()]
    ends = [line for line in logged if line["event"] == "transfer_end"]
    assert sorted((line["handle"], line["outcome"]) for line in ends) == [(f"d{n}", "landed") for n in range(5)]
    assert not [line for line in logged if line["event"].endswith("_moved")]


def test_the_tally_tells_missing_from_repeated_ends() -> None:
    """Each participant is counted by itself, and an outcome that is not its side's good one has its reason."""
    who = ("d", Participant.WORKER)
    tally = Tally(3, [who, ("p", Participant.WORKER)])
    tally.hear(who, 0, _end(Outcome.LANDED))
    tally.hear(who, 1, _end(Outcome.LANDED))
    tally.hear(who, 1, _end(Outcome.FAILED, "PEER_LOST"))
    assert (tally.missing, tally.repeated, dict(tally.reasons)) == (4, 1, {"PEER_LOST": 1})


async def test_cancelled_copies_give_everything_back() -> None:
    """Transfers cancelled with their copy in flight end as CANCELLED, and no block stays behind."""
    async with running_kvd() as kvd:
        done = await fences(kvd, 3, _SEED)
        assert len(done.ms) == 3
        assert (done.seen.open_ends, done.seen.blocks_held, done.seen.defects) == (0, 0, 0)
        assert kvd.node.transfers.book.ended["CANCELLED"] == 6


async def test_a_failing_copy_is_no_fence() -> None:
    """What fails before it could be cancelled is an error and not a measurement."""
    async with running_kvd(transport="sim") as kvd:
        kvd.faults.script[:] = [Fault.FAIL]
        with pytest.raises(Broken, match="TRANSFER_FAILED"):
            await fences(kvd, 1, _SEED)


async def test_a_short_run_has_every_line() -> None:
    """The daemon as a process: every line is there, and the one about faults is met; no time is asserted."""
    results = await load(Load(rate=100, seconds=0.5, total=100, in_flight=8, fences=2, sample_every=1, seed=_SEED))
    assert [one.name for one in results] == [
        "load: faults",
        "load: control p50",
        "load: control p99",
        "load: memory growth",
        "load: speed",
        "load: CPU",
        "load: longest fence",
    ]
    assert (results[0].value, results[0].met) == (0, True), results[0].detail
    assert "100 compared byte for byte" in results[0].detail


async def test_what_is_missing_is_a_line_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transfers do not end the run says how many, instead of ending without a word."""

    async def never(traffic: Traffic) -> None:
        raise TimeoutError

    monkeypatch.setattr(Traffic, "settle", never)
    (faults,) = await load(Load(rate=100, seconds=0.1, total=20, in_flight=8, fences=1, sample_every=1, seed=_SEED))
    assert (faults.name, faults.met) == ("load: faults", False)
    assert "ends missing" in faults.detail


async def test_what_could_not_be_measured_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one fence in time, or one transfer that landed, the lines are there, missed, and say why."""

    async def none(*_: object) -> Fences:
        raise Broken("0 of 10 transfers were cancelled")

    monkeypatch.setattr(bench_load, "fences", none)
    monkeypatch.setattr(Traffic, "_hears", _deaf_to_landed(Traffic._hears))
    results = await load(Load(rate=100, seconds=0.1, total=20, in_flight=8, fences=1, sample_every=1, seed=_SEED))
    missed = {one.name: one.detail for one in results if "not measured" in one.detail}
    assert missed == {
        "load: control p50": "not measured: no transfer landed",
        "load: control p99": "not measured: no transfer landed",
        "load: longest fence": "not measured: 0 of 10 transfers were cancelled",
    }
    assert not any(one.met for one in results if one.name in missed)


def _deaf_to_landed(hears: Any) -> Any:
    """Every end is heard as a failed one."""

    def deaf(traffic: Traffic, side: str) -> Any:
        hear = hears(traffic, side)
        return lambda kind, index, end: hear(kind, index, replace(end, outcome=Outcome.FAILED))

    return deaf


def test_sizes_that_leave_nothing_to_measure_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """A total that the rate already uses up is said, not measured."""
    with pytest.raises(SystemExit):
        bench.main(["--load", "--load-seconds", "10", "--load-total", "5000"])
    assert "5000 transfers at a rate, of 5000 in all" in capfd.readouterr().err


def test_a_line_without_a_target_says_so() -> None:
    """A number to know is neither met nor missed."""
    result = bench.Result("load: speed", 1.0, "transfers/s", None, True, "why")
    assert "no target" in bench.line(result, as_json=False)
    assert json.loads(bench.line(result, as_json=True))["target"] is None


def test_usage_leaves_out_what_is_shared() -> None:
    """The engines' memory, which kvd maps, is not counted as its own; its own is, and so is its CPU."""
    before = usage(os.getpid())
    with mmap.mmap(-1, 64 * _MIB) as shared:
        shared[:: mmap.PAGESIZE] = b"x" * (64 * _MIB // mmap.PAGESIZE)
        with_shared = usage(os.getpid())
    # Pages of its own: an allocator could hand out again what an earlier test has left resident.
    with mmap.mmap(-1, 64 * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own[:: mmap.PAGESIZE] = b"x" * (64 * _MIB // mmap.PAGESIZE)
        with_own = usage(os.getpid())
    assert with_shared.memory - before.memory < 16 * _MIB
    assert with_own.memory - before.memory > 48 * _MIB
    assert with_own.cpu >= before.cpu > 0
