"""Processes are started in order, waited for, watched and drained; none is left behind. The services are fakes."""

import asyncio
import dataclasses
import io
import os
import signal
from pathlib import Path

import pytest

from pdserve.cli import deployment
from pdserve.cli.board import Board
from pdserve.cli.fleet import Fleet
from pdserve.cli.processes import Child, Guard
from pdserve.client import Unavailable
from tests.unit.cli.fakes import WAIT, alive, fake_plan


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


async def test_a_process_that_dies_later_is_noticed(folder: Path, board: Board) -> None:
    """`died` raises when a running process is killed, and says by which signal."""
    async with Fleet(fake_plan(folder), board) as fleet:
        await fleet.start(WAIT)
        death = asyncio.create_task(fleet.died())
        os.kill(fleet.pids["decode-0"], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"decode-0 .* was ended by signal 9"):
            await asyncio.wait_for(death, WAIT)


async def test_what_is_not_ready_in_time_is_named(folder: Path, board: Board) -> None:
    """The deadline's error says which process does not serve."""
    plan = fake_plan(folder, proxy=("--listen", "127.0.0.1:0"))  # the last --listen counts: never found
    async with Fleet(plan, board) as fleet:
        with pytest.raises(Unavailable, match="not ready within 2 s: proxy does not serve"):
            await fleet.start(2.0)


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
