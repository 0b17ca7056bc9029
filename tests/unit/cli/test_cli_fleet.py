"""Processes are started in order, waited for, watched and drained; none is left behind. The services are fakes."""

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
from pdserve.cli.processes import Child, Guard
from pdserve.client import ConfigError, Unavailable
from tests.unit.cli.fakes import WAIT, alive, fake_plan, until


async def test_a_fleet_comes_up_and_goes_down_in_order(folder: Path, board: Board, out: io.StringIO) -> None:
    """Ready means that the proxy knows every engine; the drain takes the proxy first and kvd last."""
    async with Fleet(fake_plan(folder), board) as fleet:
        await fleet.start(WAIT)
        pids = fleet.pids
        assert list(pids) == ["kvd", "prefill-0", "decode-0", "proxy"]
        assert set(await fleet.engines()) == {"prefill-0", "decode-0"}
    order = (folder / "order").read_text().split()
    assert order[0] == "proxy"
    assert order[-1] == "kvd"
    assert sorted(order[1:-1]) == ["decode-0", "prefill-0"]
    assert not any(alive(pid) for pid in pids.values())
    shown = out.getvalue()
    assert shown.index("kvd: serving") < shown.index("prefill-0: starting")
    assert "prefill-0: ready" in shown
    assert "fake kvd begins" in (folder / "logs" / "kvd.log").read_text()


async def test_a_process_that_dies_while_starting_is_named_with_its_log(folder: Path, board: Board) -> None:
    """The error says which process ended, how, and the last lines of its log; the others are stopped."""
    fleet = Fleet(fake_plan(folder, decode_0=("--die", "3")), board)
    async with fleet:
        with pytest.raises(Unavailable, match=r"decode-0 .* ended with status 3(?s:.*)something is wrong"):
            await fleet.start(WAIT)
        pids = fleet.pids
    assert not any(alive(pid) for pid in pids.values())


async def test_a_process_that_refuses_its_settings_is_a_wrong_setting(folder: Path, board: Board) -> None:
    """Status 2 is what every service ends with for flags that cannot work: trying again is of no use."""
    async with Fleet(fake_plan(folder, decode_0=("--die", "2")), board) as fleet:
        with pytest.raises(ConfigError, match=r"decode-0 .* ended with status 2(?s:.*)something is wrong"):
            await fleet.start(WAIT)


async def test_failpoints_reach_the_process_that_they_name(
    folder: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other: each has the variable without the names, or empty."""
    monkeypatch.setenv("PDSERVE_FAILPOINTS", "kvd:kvd.post=1*pause; decode-0:sim.step=pause;kvd:clock=return(3)")
    plan = fake_plan(folder)
    shown = tuple(dataclasses.replace(p, argv=(*p.argv, "--environ", "PDSERVE_FAILPOINTS")) for p in plan.processes)
    async with Fleet(dataclasses.replace(plan, processes=shown), board) as fleet:
        await fleet.start(WAIT)
    has = {p.name: re.findall("PDSERVE_FAILPOINTS is (.*)", p.log.read_text()) for p in plan.processes}
    assert has == {
        "kvd": ["kvd.post=1*pause;clock=return(3)"],
        "prefill-0": [""],
        "decode-0": ["sim.step=pause"],
        "proxy": [""],
    }


async def test_a_process_that_dies_later_is_noticed(folder: Path, board: Board) -> None:
    """`died` raises when a running process is killed, and says by which signal."""
    async with Fleet(fake_plan(folder), board) as fleet:
        await fleet.start(WAIT)
        death = asyncio.create_task(fleet.died())
        os.kill(fleet.pids["decode-0"], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"decode-0 .* was ended by signal 9"):
            await asyncio.wait_for(death, WAIT)


async def test_what_is_not_ready_in_time_is_named(
    folder: Path, board: Board, out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline's error says which process does not serve. It passes when the others do, however long they took."""
    plan = fake_plan(folder, proxy=("--listen", "127.0.0.1:0"))  # the last --listen counts: never found
    loop, hour = asyncio.get_running_loop(), 3600.0
    now = loop.time
    async with Fleet(plan, board) as fleet:
        start = asyncio.create_task(fleet.start(hour))
        await until(lambda: all(f"{name}: serving" in out.getvalue() for name in ("kvd", "prefill-0", "decode-0")))
        monkeypatch.setattr(loop, "time", lambda: now() + hour)
        with pytest.raises(Unavailable, match="not ready within 3600 s: proxy does not serve"):
            await start


async def test_a_process_that_does_not_stop_is_killed(
    folder: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ignores SIGTERM is ended all the same when the user is in a hurry."""
    monkeypatch.setattr("pdserve.cli.processes._STOP_SECONDS", 0.3)
    async with Fleet(fake_plan(folder, prefill_0=("--stubborn",)), board, grace=WAIT) as fleet:
        await fleet.start(WAIT)
        pids = fleet.pids
        fleet.hurry.set()
    assert not alive(pids["prefill-0"])


async def test_in_haste_a_process_is_told_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two signals that meet before the process looks are one: it would drain, and be killed for that, and its clients
    would hear no reason. It does not run while the first two are sent, so that they do meet."""
    plan = fake_plan(folder, kvd=("--drains",)).processes[0]
    child, hurry, sent = await Child.start(plan), asyncio.Event(), 0
    tell = Child.signal

    def counted(self: Child, number: signal.Signals) -> None:
        nonlocal sent
        tell(self, number)
        sent += 1
        if sent == 2:
            os.kill(self.pid, signal.SIGCONT)

    try:
        await until_serving(plan.target)
        os.kill(child.pid, signal.SIGSTOP)
        monkeypatch.setattr(Child, "signal", counted)
        hurry.set()
        await child.stop(WAIT, hurry)
        assert child.returncode == 0, "it was killed"
    finally:
        child._kill_group()
        await child.wait()


async def until_serving(target: str) -> None:
    """Returns when a process answers there."""
    async with asyncio.timeout(WAIT):
        while not await probe.serving(target):  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(0.02)


async def test_the_guard_lets_a_process_end_what_it_has_started(folder: Path) -> None:
    """When we vanish a service is told to drain; what it has started, which it needs for that, is not told, but where
    the service has gone before."""
    guard, kept, left = await Guard.start(), folder / "kept", folder / "left"
    plans = fake_plan(folder, kvd=("--helper", str(kept)), prefill_0=("--helper", str(left))).processes
    drains, gone = await Child.start(plans[0]), await Child.start(plans[1])
    try:
        for child in (drains, gone):
            await until_serving(child.plan.target)
            await guard.watch(child)
        gone.signal(signal.SIGKILL)
        await asyncio.wait_for(gone.wait(), WAIT)
        guard._process.stdin.close()  # type: ignore[union-attr]  # what the kernel does for a dead process
        assert await asyncio.wait_for(drains.wait(), WAIT) == 0
        await until(left.exists)
        assert not kept.exists()
    finally:
        await asyncio.gather(*(child.stop(0.0, asyncio.Event()) for child in (drains, gone)))
        await guard.aclose()


async def test_the_guard_ends_what_it_watches_when_we_vanish(folder: Path) -> None:
    """When the pipe to the guard breaks, as it does when we are killed, the processes get SIGTERM."""
    guard = await Guard.start()
    child = await Child.start(fake_plan(folder).processes[0])
    try:
        await guard.watch(child)
        guard._process.stdin.close()  # type: ignore[union-attr]  # what the kernel does for a dead process
        # SIGTERM, before the fake has a handler or after it: either way it ends.
        assert await asyncio.wait_for(child.wait(), WAIT) in (0, -signal.SIGTERM)
    finally:
        await child.stop(0.0, asyncio.Event())
        await guard.aclose()


async def test_the_guard_forgets_what_has_ended(folder: Path) -> None:
    """The number of a process that is gone may be another's: when we vanish, only what still runs gets SIGTERM."""
    guard = await Guard.start()
    kvd, other, *_ = fake_plan(folder).processes
    ended, runs = await Child.start(kvd), await Child.start(other)
    try:
        await guard.watch(ended)
        await guard.watch(runs)
        await guard.forget(ended)
        guard._process.stdin.close()  # type: ignore[union-attr]  # as above
        await asyncio.wait_for(runs.wait(), WAIT)
        await asyncio.wait_for(guard._process.wait(), WAIT)
        assert ended.returncode is None
    finally:
        await asyncio.gather(*(child.stop(0.0, asyncio.Event()) for child in (ended, runs)))
        await guard.aclose()


async def test_a_pinned_process_runs_on_its_core(folder: Path) -> None:
    """The plan's core is the process' whole affinity."""
    core = deployment.usable_cores()[-1]
    child = await Child.start(dataclasses.replace(fake_plan(folder).processes[0], core=core))
    try:
        assert os.sched_getaffinity(child.pid) == {core}
    finally:
        await child.stop(WAIT, asyncio.Event())


async def test_what_cannot_be_pinned_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that is not there is known only once the process is: it has ended when the error is raised."""
    started: list[int] = []

    def refused(pid: int, _: object) -> None:
        assert alive(pid)
        started.append(pid)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("pdserve.cli.processes.os.sched_setaffinity", refused)
    with pytest.raises(OSError, match="Invalid argument"):
        await Child.start(dataclasses.replace(fake_plan(folder).processes[0], core=0))
    assert len(started) == 1
    assert not alive(started[0])


async def test_what_even_a_kill_does_not_end_is_named(
    folder: Path, board: Board, out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs in the kernel holds up nobody for ever: an error names it, and the others have ended."""
    monkeypatch.setattr("pdserve.cli.processes._STOP_SECONDS", 0.1)
    kill = Child._kill_group

    def kills(child: Child) -> None:
        if child.name != "prefill-0":
            kill(child)

    async with Fleet(fake_plan(folder, prefill_0=("--stubborn",)), board, grace=0.1) as fleet:
        await fleet.start(WAIT)
        pids = fleet.pids
        (child,) = [keeper.child for keeper in fleet._keepers if keeper.name == "prefill-0"]
        with monkeypatch.context() as patch:
            patch.setattr("pdserve.cli.processes._CLEAR_SECONDS", 0.1)
            patch.setattr(Child, "_kill_group", kills)
            try:
                with pytest.raises(Unavailable, match="prefill-0 was killed and does not end"):
                    await asyncio.wait_for(fleet.aclose(), WAIT)
                assert [name for name, pid in pids.items() if alive(pid)] == ["prefill-0"]
            finally:
                kill(child)
                await asyncio.wait_for(child.wait(), WAIT)
    assert "prefill-0: does not end" in out.getvalue()
