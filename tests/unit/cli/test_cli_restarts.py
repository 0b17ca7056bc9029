"""A process that dies is started again where it was, a few times, and nothing of it is left behind. The services are
fakes."""

import asyncio
import dataclasses
import io
import os
import re
import signal
from pathlib import Path

import pytest

from pdserve.cli import deployment, probe
from pdserve.cli.board import Board
from pdserve.cli.fleet import Fleet
from pdserve.cli.keeper import Keeper
from pdserve.cli.plan import Process
from pdserve.cli.processes import Guard
from pdserve.cli.restarts import Allowance
from pdserve.client import ConfigError, PdserveError, Unavailable
from tests.unit.cli.fakes import WAIT, alive, fake_plan, until

NAMES = ("kvd", "prefill-0", "decode-0", "proxy")


def kill(fleet: Fleet, name: str) -> int:
    """kill -9; the pid that was."""
    pid = fleet.pids[name]
    os.kill(pid, signal.SIGKILL)
    return pid


class TestAllowance:
    def test_pauses_grow(self) -> None:
        """The first restart comes at once, each later one a step later than the one before; then there is none."""
        allowance = Allowance(4, step=1.0)
        assert [allowance.take() for _ in range(6)] == [0.0, 1.0, 2.0, 3.0, None, None]
        assert allowance.used == 4

    def test_none_is_none(self) -> None:
        """With 0 the first death is the last."""
        allowance = Allowance(0)
        assert allowance.take() is None
        assert allowance.used == 0

    def test_fewer_than_none_is_refused(self) -> None:
        """A negative number of restarts is a mistake, not none."""
        with pytest.raises(ConfigError, match="-1"):
            Allowance(-1)


@pytest.mark.parametrize("name", NAMES)
async def test_one_that_dies_is_started_again_where_it_was(
    folder: Path, board: Board, out: io.StringIO, name: str
) -> None:
    """Whichever it is: another pid at the same address, the others untouched; the board says how it ended, how often it
    may yet, and its last words, and its log has both lives."""
    plan = fake_plan(folder)
    target = next(p.target for p in plan.processes if p.name == name)
    async with Fleet(plan, board, restarts=2) as fleet:
        await fleet.start(WAIT)
        before, told = fleet.pids, asyncio.Event()
        fleet.changed = told.set
        old = kill(fleet, name)
        await asyncio.wait_for(told.wait(), WAIT)
        after = fleet.pids
        await until(lambda: not fleet.away)
        assert await probe.serving(target, timeout=WAIT)
        assert {other for other in NAMES if before[other] != after[other]} == {name}
        assert fleet.restarts == {other: int(other == name) for other in NAMES}
        assert set(await fleet.engines()) == {"prefill-0", "decode-0"}
    shown, log = out.getvalue(), (folder / "logs" / f"{name}.log").read_text()
    assert f"{name} (pid {old}) was ended by signal 9; it is started again, restart 1 of 2" in shown
    assert f"\n    fake {name} begins" in shown
    assert log.count(f"fake {name} begins") == 2
    assert not any(alive(pid) for pid in (*before.values(), *after.values()))


async def test_one_more_death_is_the_end(folder: Path, board: Board, out: io.StringIO) -> None:
    """Each has its own restarts: after those of decode-0 its death is the deployment's, said with its last life's log;
    the one of prefill-0 took none of them."""
    async with Fleet(fake_plan(folder), board, restarts=1) as fleet:
        await fleet.start(WAIT)
        death = asyncio.create_task(fleet.died())
        for name in ("prefill-0", "decode-0"):
            kill(fleet, name)
            await until(lambda name=name: fleet.restarts[name] == 1 and not fleet.away)  # type: ignore[misc]
        assert not death.done()
        kill(fleet, "decode-0")
        with pytest.raises(
            Unavailable, match=r"decode-0 .* signal 9 after restart 1 of 1; the end of its log"
        ) as raised:
            await asyncio.wait_for(death, WAIT)
    assert raised.value.message.count("fake decode-0 begins") == 1
    assert out.getvalue().count("decode-0: starting") == 2


async def test_the_deployment_goes_on_without_its_trace_store(folder: Path, board: Board, out: io.StringIO) -> None:
    """The last death of the trace store is said, and the record no longer has its process; nothing else ends."""
    async with Fleet(fake_plan(folder, traces=True), board, restarts=1) as fleet:
        await fleet.start(WAIT)
        death = asyncio.create_task(fleet.died())
        kill(fleet, "traces")
        await until(lambda: fleet.restarts["traces"] == 1 and not fleet.away)
        told = asyncio.Event()
        fleet.changed = told.set
        kill(fleet, "traces")
        await asyncio.wait_for(told.wait(), WAIT)
        assert set(fleet.pids) == set(NAMES)
        assert set(await fleet.engines()) == {"prefill-0", "decode-0"}
        assert not death.done()
        kill(fleet, "kvd")  # still kept
        await until(lambda: fleet.restarts["kvd"] == 1)
        death.cancel()
        await asyncio.gather(death, return_exceptions=True)
    assert re.search(
        r"traces are not kept any more; traces \(pid \d+\) .* after restart 1 of 1; the end", out.getvalue()
    )


async def test_a_trace_store_that_never_served_is_the_end(folder: Path, board: Board) -> None:
    """A start that cannot keep the traces it was asked to keep fails, and says why."""
    plan = fake_plan(folder, traces=True)
    broken = tuple(
        dataclasses.replace(p, argv=(*p.argv, "--die", "3")) if p.kind == "traces" else p for p in plan.processes
    )
    async with Fleet(dataclasses.replace(plan, processes=broken), board) as fleet:
        with pytest.raises(Unavailable, match=r"traces .* ended with status 3"):
            await fleet.start(WAIT)


async def test_one_that_never_served_is_not_started_again(folder: Path, board: Board, out: io.StringIO) -> None:
    """What cannot start will not start the next time: it is named at once, whatever may be started again."""
    async with Fleet(fake_plan(folder, decode_0=("--die", "3")), board, restarts=9) as fleet:
        with pytest.raises(Unavailable, match=r"decode-0 .* ended with status 3; the end of its log"):
            await fleet.start(WAIT)
    assert out.getvalue().count("decode-0: starting") == 1


async def test_a_life_that_does_not_come_to_serve_counts(folder: Path, board: Board, out: io.StringIO) -> None:
    """One that has served before may fail to come back, for a port or a kvd that is not there: it is tried as often as
    it may die, with growing pauses."""
    plan = fake_plan(folder, prefill_0=("--die-again", str(folder / "lived")))
    async with Fleet(plan, board, restarts=3, pause_step=0.05) as fleet:
        await fleet.start(WAIT)
        death = asyncio.create_task(fleet.died())
        kill(fleet, "prefill-0")
        with pytest.raises(Unavailable, match=r"ended with status 3 after restart 3 of 3(?s:.*)not again"):
            await asyncio.wait_for(death, WAIT)
    assert re.findall(r"started (again.*), restart", out.getvalue()) == ["again", "again in 0.05 s", "again in 0.1 s"]


async def test_what_the_dead_left_is_gone_before_the_next_life(folder: Path, board: Board) -> None:
    """A process that the dead one has started, and that takes no notice of SIGTERM, does not see the next life: it has
    cores and memory that are needed."""
    child = folder / "child"
    async with Fleet(fake_plan(folder, decode_0=("--child", str(child))), board, restarts=1) as fleet:
        await fleet.start(WAIT)
        first = int(child.read_text())
        assert alive(first)
        kill(fleet, "decode-0")
        await until(lambda: fleet.restarts["decode-0"] == 1 and not fleet.away)
        second = int(child.read_text())
        assert second != first
    assert "the old child lives" not in (folder / "logs" / "decode-0.log").read_text()
    assert not alive(first)
    assert not alive(second)


async def test_one_that_does_not_serve_again_in_time_is_named(folder: Path, board: Board) -> None:
    """A restart has a deadline: past it the deployment ends, with the log of that life."""
    plan = fake_plan(folder, kvd=("--serve-once", str(folder / "lived"))).processes[0]
    guard, lost = await Guard.start(), asyncio.Queue[PdserveError]()
    keeper = Keeper(plan, guard, board, Allowance(1), patience=1.0)
    try:
        await keeper.start(lost.put_nowait, lambda: None)
        await until(lambda: (folder / "lived").exists())
        keeper.served()
        os.kill(keeper.pid, signal.SIGKILL)
        error = await asyncio.wait_for(lost.get(), WAIT)
        assert "kvd was started again and did not serve within 1 s" in error.message
    finally:
        await keeper.stop(0.0, asyncio.Event())
        await guard.aclose()


async def test_a_defect_of_the_keeper_is_the_end(folder: Path, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody watches any more is not passed over: the deployment ends, and says why."""

    async def broken(process: Process) -> bool:
        raise RuntimeError("a defect")

    async with Fleet(fake_plan(folder), board, restarts=2) as fleet:
        await fleet.start(WAIT)
        monkeypatch.setattr(probe, "up", broken)
        kill(fleet, "kvd")
        with pytest.raises(PdserveError, match="kvd is not watched any more: RuntimeError: a defect"):
            await asyncio.wait_for(fleet.died(), WAIT)


async def test_a_drain_does_not_wait_for_a_pause(folder: Path, board: Board, out: io.StringIO) -> None:
    """Ctrl-C between two lives: there is no next one, and what runs is drained at once."""
    plan = fake_plan(folder, prefill_0=("--die-again", str(folder / "lived")))
    async with Fleet(plan, board, restarts=2, pause_step=3600.0) as fleet:
        await fleet.start(WAIT)
        kill(fleet, "prefill-0")
        await until(lambda: "again in 3600 s" in out.getvalue())
        pids = fleet.pids
    assert not any(alive(pid) for pid in pids.values())
    assert out.getvalue().count("prefill-0: starting") == 2


async def test_what_dies_during_a_drain_stays_dead(
    folder: Path, board: Board, out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the proxy drains an engine dies: it was to be stopped anyway."""
    monkeypatch.setattr("pdserve.cli.processes._STOP_SECONDS", 0.3)
    async with Fleet(fake_plan(folder, proxy=("--stubborn",)), board, grace=WAIT, restarts=2) as fleet:
        await fleet.start(WAIT)
        pids = fleet.pids
        drain = asyncio.create_task(fleet.aclose())
        await until(lambda: "proxy: draining" in out.getvalue())
        kill(fleet, "decode-0")
        await until(lambda: not alive(pids["decode-0"]))
        fleet.hurry.set()
        await asyncio.wait_for(drain, WAIT)
    assert out.getvalue().count("decode-0: starting") == 1
    assert not any(alive(pid) for pid in pids.values())


async def test_the_next_life_keeps_the_core(folder: Path, board: Board) -> None:
    """What was pinned is pinned to the same core again."""
    core = deployment.usable_cores()[-1]
    plan = fake_plan(folder)
    pinned = tuple(dataclasses.replace(p, core=core if p.name == "decode-0" else None) for p in plan.processes)
    async with Fleet(dataclasses.replace(plan, processes=pinned), board, restarts=1) as fleet:
        await fleet.start(WAIT)
        old = kill(fleet, "decode-0")
        await until(lambda: fleet.restarts["decode-0"] == 1 and not fleet.away)
        assert fleet.pids["decode-0"] != old
        assert os.sched_getaffinity(fleet.pids["decode-0"]) == {core}
