"""What is known of mori 1.2.4, row by row: that it is so (`sees`, by mori_raw), and what the transport makes of it.

A module that runs it gives a `Bench`: of the fake, also with a row switched off, or of the real library.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from pdserve.kvd.config import MoriBackend, MoriConfig
from pdserve.kvd.plan import Runs
from pdserve.kvd.testing.mori import FAKE, Machine, Row, to_env
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library, MoriProcess
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.transport.start import Command
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError, TransferFailed
from tests.contract.kvd.far_rig import Nodes, count, everything, lives, paint, region, some, until
from tests.contract.kvd.mori_ranks import Placed, Rank

SIZE: Final = 32 << 20
FAST: Final = MoriConfig(stall=1.0, connect=1.0, start=20.0, idle=0.2)
RAW: Final = "tests.contract.kvd.mori_raw"
_SEES_S: Final = 30.0
_MOST_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Seen:
    """What a process saw of the library: how it ended, and its words."""

    status: int
    value: Any = None


@dataclass
class Bench:
    """A library: the fake without `off`, or another one. `folder`: for files that say what happens to a machine."""

    folder: Path
    library: Library
    off: Row | None = None
    hosted: bool = False
    """mori lives in the processes of ranks that have device memory; else in kvd's own, with host memory."""
    hosts: str = FAKE.api
    """The library of those ranks."""

    async def sees(self, row: Row, machine: Machine | None = None, seconds: float = _SEES_S) -> Seen:
        """Uses the library alone. Raises TimeoutError where its process does not end."""
        seen, words = os.memfd_create("seen"), os.memfd_create("words")
        try:
            env = to_env(self.off, machine)
            process = await self.library.start(Command(RAW, (self.library.api, row.name), (seen,), words, env))
            try:
                status = await asyncio.wait_for(process.wait(), seconds)
            except BaseException:
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
                raise
            finally:
                print(os.pread(words, _MOST_BYTES, 0).decode())
            value = os.pread(seen, _MOST_BYTES, 0)
            return Seen(status, json.loads(value) if value else None)
        finally:
            os.close(seen)
            os.close(words)

    @contextlib.asynccontextmanager
    async def nodes(
        self, producer: Machine | None = None, consumer: Machine | None = None, config: MoriConfig = FAST
    ) -> AsyncIterator[Nodes[MoriTransport]]:
        """Two daemons' transports on such machines."""
        async with contextlib.AsyncExitStack() as stack:
            arena = Arena([1 << 32])
            stack.callback(arena.close)
            sides = [
                await self._side(stack, arena, machine, config, name, fill)
                for machine, name, fill in ((producer, "p", 7), (consumer, "d", 0))
            ]
            (serves, src), (reads, dst) = sides
            yield Nodes(arena, serves, reads, src, dst)

    async def _side(
        self,
        stack: contextlib.AsyncExitStack,
        arena: Arena,
        machine: Machine | None,
        config: MoriConfig,
        name: str,
        fill: int,
    ) -> tuple[MoriTransport, MappedRegion]:
        if not self.hosted:
            made = MoriTransport(arena, config, self.library, to_env(self.off, machine))
            stack.push_async_callback(made.aclose)
            return made, region(arena, name, fill, SIZE)
        env = to_env(self.off, msgspec.structs.replace(machine or Machine(), foreign=False))
        rank = await Rank.start(self.library, env, arena, name, fill, SIZE, self.hosts)
        stack.push_async_callback(rank.aclose)
        placed = Placed(arena, config, self.library, env, rank)
        stack.push_async_callback(placed.aclose)
        return placed, rank.region

    async def ends(self, process: MoriProcess) -> None:
        """An engine goes away, but not the rank that has it."""
        if self.hosted:
            process.end("a test wants it")
        else:
            os.kill(process.pid, signal.SIGKILL)
        await process.gone()

    def over(self, process: MoriProcess) -> bool:
        """Whether an engine is gone, and with it no rank."""
        return not process.running and lives(process.pid) is self.hosted

    def file(self, name: str) -> Path:
        """One that is not there yet."""
        return self.folder / name


Case = Callable[[Bench], Awaitable[None]]
CASES: dict[Row, Case] = {}


def case(row: Row) -> Callable[[Case], Case]:
    """The case of a row."""

    def named(made: Case) -> Case:
        CASES[row] = made
        return made

    return named


def whole() -> Runs:
    """All of a region, in blocks."""
    return everything(size=SIZE)


async def good(nodes: Nodes[MoriTransport]) -> bool:
    """Whether all of a region can be copied, right to the last byte."""
    session = await nodes.consumer.reach(await nodes.described(), nodes.dst)
    await session.start(whole()).wait()
    await session.close()
    return count(nodes.arena, nodes.dst, 7) == SIZE


@case(Row.NO_TCP)
async def no_tcp(bench: Bench) -> None:
    """There is no such backend; kvd offers none."""
    seen = await bench.sees(Row.NO_TCP)
    assert "NotImplementedError" in seen.value
    assert "TCP" not in {backend.name for backend in MoriBackend}


@case(Row.NEEDS_DEVICE)
async def needs_device(bench: Bench) -> None:
    """A node without a device has no cards, and hears why."""
    none = Machine(devices=0)
    assert "no active RDMA device" in (await bench.sees(Row.NEEDS_DEVICE, none)).value
    async with bench.nodes(producer=none) as nodes:
        with pytest.raises(TransferFailed, match="no active RDMA device"):
            await nodes.described()
        assert nodes.producer.processes() == []


@case(Row.FALLBACK)
async def fallback(bench: Bench) -> None:
    """Only a "0" makes it carry on, at port 1. kvd's environment does not reach it, so there is no silent fallback."""
    none = Machine(devices=0)
    seen = (await bench.sees(Row.FALLBACK, none)).value
    assert seen[0] == "port 1"
    assert all("no active RDMA device" in word for word in seen[1:])
    os.environ["MORI_DISABLE_AUTO_XGMI"] = "0"
    try:
        async with bench.nodes(producer=none) as nodes:
            with pytest.raises(TransferFailed, match="no active RDMA device"):
                await nodes.described()
    finally:
        del os.environ["MORI_DISABLE_AUTO_XGMI"]


@case(Row.XGMI_NEEDS_GPUS)
async def xgmi_needs_gpus(bench: Bench) -> None:
    """It has nothing for host memory, and kvd does not say it had; what is asked all the same fails with its words."""
    assert (await bench.sees(Row.XGMI_NEEDS_GPUS)).value is True
    async with bench.nodes(config=replace(FAST, backend=MoriBackend.XGMI)) as nodes:
        assert MemoryKind.HOST not in nodes.consumer.capabilities.kinds
        with pytest.raises(TransferFailed, match="for rdma alone" if bench.hosted else "No available backend found"):
            await nodes.reach()


@case(Row.EXITS)
async def exits(bench: Bench) -> None:
    """It takes its own process along, not kvd; who asked hears how it ended."""
    bare = Machine(rocm=False)
    assert (await bench.sees(Row.EXITS, bare)).status == 255
    async with bench.nodes(producer=bare) as nodes:
        with pytest.raises(TransferFailed, match=r"ended by itself \(255\)"):
            await nodes.described()


@case(Row.HANGS)
async def hangs(bench: Bench) -> None:
    """It is waited for no longer than said, and gone then."""
    virtual = Machine(virtual=True)
    with pytest.raises(TimeoutError):
        await bench.sees(Row.HANGS, virtual, seconds=0.5)
    async with bench.nodes(producer=virtual, config=MoriConfig(connect=0.3, start=0.5)) as nodes:
        with pytest.raises(TransferFailed, match=r"did not answer within 0\.5 s"):
            await nodes.described()


@case(Row.ABORTS)
async def aborts(bench: Bench) -> None:
    """A device that does not take the memory ends the one process, whichever side it is on; kvd and the memory stay."""
    none = Machine(registers=False)
    assert (await bench.sees(Row.ABORTS, none)).status == -signal.SIGABRT
    async with bench.nodes(consumer=none) as nodes:
        with pytest.raises(TransferFailed, match=r"ended by itself \(-6\)"):
            await nodes.reach()
        assert len(nodes.producer.processes()) == 1
    async with bench.nodes(producer=none) as nodes:
        with pytest.raises(TransferFailed, match=r"ended by itself \(-6\)" if bench.hosted else "control port"):
            await nodes.reach()
        await until(lambda: not nodes.producer.processes())
        assert await nodes.still()  # a rank lives, since it was tried elsewhere: its memory is seen


@case(Row.NOTIFICATIONS_POISON)
async def notifications_poison(bench: Bench) -> None:
    """They are off: as many copies as you like come through."""
    assert "ENOMEM" in (await bench.sees(Row.NOTIFICATIONS_POISON)).value
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        for _ in range(10):
            assert (await session.start(some()).wait()).nbytes == 4096
        await session.close()


@case(Row.NOTIFICATIONS_STAY)
async def notifications_stay(bench: Bench) -> None:
    """What would tell the passive side never goes away: kvd's end comes from the side that reads."""
    assert (await bench.sees(Row.NOTIFICATIONS_STAY)).value == ["SUCCESS", "SUCCESS", "none"]


@case(Row.OUT_OF_RANGE)
async def out_of_range(bench: Bench) -> None:
    """kvd asks for nothing of the kind; where it did, the session would live."""
    failed, then = (await bench.sees(Row.OUT_OF_RANGE)).value
    assert failed == "ERR_INVALID_ARGS length out of range"
    assert then == "SUCCESS"
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        with pytest.raises(TransferFailed, match="leaves its region"):
            session.start(Runs(*(some(SIZE + 1).src, some().dst, some(SIZE + 1).length)))
        await session.start(some()).wait()
        await session.close()


@case(Row.REMOTE_ERROR)
async def remote_error(bench: Bench) -> None:
    """A late read of what was taken back fails with its process, which another one replaces; nothing of it is taken."""
    first, failed, *_ = (await bench.sees(Row.REMOTE_ERROR)).value
    assert (first, failed) == ("SUCCESS", "ERR_RDMA_OP remote access error")
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        (reading,) = nodes.consumer.processes()
        await nodes.producer.forget(nodes.src)
        with pytest.raises(TransferFailed, match="remote access error"):
            await session.start(whole()).wait()
        assert session.over
        assert bench.over(reading)
        assert await good(nodes)
        await session.close()


@case(Row.ALIVE_LIES)
async def alive_lies(bench: Bench) -> None:
    """Of a dead queue pair everything looks well. kvd asks it nothing: after an error there is another process."""
    _, _, flushed, alive, again = (await bench.sees(Row.ALIVE_LIES)).value
    assert alive
    assert flushed == again == "ERR_RDMA_OP Work Request Flushed Error"


@case(Row.SILENCE)
async def silence(bench: Bench) -> None:
    """A peer that is gone is not told of. kvd waits for the stall, ends the process, and then says so."""
    read, untold = (await bench.sees(Row.SILENCE)).value
    assert read == "IN_PROGRESS"
    assert untold
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        os.kill(nodes.serving, signal.SIGKILL)
        with pytest.raises(TransferFailed, match="no byte came for 1 s"):
            await asyncio.wait_for(session.start(whole()).wait(), 10)
        assert nodes.consumer.processes() == []
        await session.close()


@case(Row.STALE_KEY)
async def stale_key(bench: Bench) -> None:
    """So no engine of kvd's has the key of another one, and one that was started anew is read at once."""
    same, fresh = (await bench.sees(Row.STALE_KEY)).value
    assert (same, fresh) == ("IN_PROGRESS", "SUCCESS")
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        (before,) = nodes.producer.processes()
        await bench.ends(before)
        again = await nodes.described()
        (after,) = nodes.producer.processes()
        assert after.name != before.name
        assert (await asyncio.wait_for(nodes.reads(again), 5)).nbytes == 4096
        await session.close()


def bound_to(pid: int) -> set[int]:
    """The cores of those threads of a process that may use but one."""
    cores: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            allowed = os.sched_getaffinity(int(task.name))
            cores |= allowed if len(allowed) == 1 else set()
    return cores


def used(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@case(Row.SPINS)
async def spins(bench: Bench) -> None:
    """A process of kvd's that has nothing to do is stopped, uses nothing, and is there again when it is called. A
    rank's process goes on: what spins there has one core, and leaves the others."""
    assert (await bench.sees(Row.SPINS)).value > 0.15
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        (serving,), (reading,) = nodes.producer.processes(), nodes.consumer.processes()
        if bench.hosted:
            assert [len(bound_to(pid)) for pid in (serving.pid, reading.pid)] == [1, 1]
            return
        await until(lambda: serving.asleep and reading.asleep)
        before = used(serving.pid) + used(reading.pid)
        await asyncio.sleep(0.3)
        assert used(serving.pid) + used(reading.pid) == before
        assert (await session.start(some()).wait()).nbytes == 4096  # wakes the one that reads, and not the other
        assert serving.asleep
        await session.close()


@case(Row.LATE_PORT)
async def late_port(bench: Bench) -> None:
    """A card has the port that the engine has once there is a backend."""
    assert (await bench.sees(Row.LATE_PORT)).value == [0, True]
    async with bench.nodes() as nodes:
        await nodes.described()
        (process,) = nodes.producer.processes()
        assert process.port > 1


@case(Row.BARE_POINTER)
async def bare_pointer(bench: Bench) -> None:
    """A status that nobody holds kills. kvd's processes hold each until it is terminal, also of what was cancelled."""
    assert (await bench.sees(Row.BARE_POINTER)).status == -signal.SIGABRT
    async with bench.nodes(consumer=Machine(rate=SIZE / 0.2)) as nodes:
        session = await nodes.reach()
        copy = session.start(whole())
        await nodes.under_way()
        copy.cancel()
        assert (await copy.wait()).cancelled
        assert (await session.start(some()).wait()).nbytes == 4096
        await session.close()


@case(Row.NO_CANCEL)
async def no_cancel(bench: Bench) -> None:
    """A cancelled copy ends with the chunks that are on their way, and with no byte later."""
    assert (await bench.sees(Row.NO_CANCEL)).value == []
    async with bench.nodes(consumer=Machine(rate=SIZE / 0.4)) as nodes:
        session = await nodes.reach()
        copy = session.start(whole())
        await nodes.under_way()
        copy.cancel()
        moved = await asyncio.wait_for(copy.wait(), 5)
        assert moved.cancelled
        assert 0 < moved.nbytes < SIZE
        assert count(nodes.arena, nodes.dst, 7) == moved.nbytes
        assert await nodes.still()
        await session.close()


@case(Row.UNREGISTERED)
async def unregistered(bench: Bench) -> None:
    """Both are errors of the session, which leave the processes as they are."""
    assert (await bench.sees(Row.UNREGISTERED)).value == ["raises", "raises"]
    async with bench.nodes() as nodes:
        described = await nodes.described()
        await nodes.producer.forget(nodes.src)
        with pytest.raises(TransferFailed, match="cannot open a session"):
            await nodes.consumer.reach(described, nodes.dst)
        assert await good(nodes)


@case(Row.LAZY)
async def lazy(bench: Bench) -> None:
    """The session is where a peer that is gone is noticed; and it serves one of whom it was never told."""
    assert (await bench.sees(Row.LAZY)).value == "raises with the session"
    async with bench.nodes() as nodes:
        described = await nodes.described()
        await bench.ends(*nodes.producer.processes())
        with pytest.raises(TransferFailed, match="control port"):
            await nodes.consumer.reach(described, nodes.dst)
        assert await good(nodes)


@case(Row.ENVIRONMENT)
async def environment(bench: Bench) -> None:
    """What would turn notifications on again does not reach it."""
    assert "ENOMEM" in (await bench.sees(Row.ENVIRONMENT)).value
    os.environ["MORI_IO_ENABLE_NOTIFICATION"] = "1"
    try:
        async with bench.nodes() as nodes:
            session = await nodes.reach()
            for _ in range(10):
                await session.start(some()).wait()
            await session.close()
    finally:
        del os.environ["MORI_IO_ENABLE_NOTIFICATION"]


@case(Row.SQ_FULL)
async def sq_full(bench: Bench) -> None:
    """Back-pressure: asked again until there is room, in shorter chunks where there never would be; no byte is lost."""
    seen = (await bench.sees(Row.SQ_FULL, Machine(queue=256, rate=1.0))).value
    assert seen.startswith("ERR_RDMA_OP SQ full")
    async with bench.nodes(consumer=Machine(queue=10)) as nodes:
        assert await good(nodes)


@case(Row.PARTIAL)
async def partial(bench: Bench) -> None:
    """No back-pressure: what was taken is under way. The copy fails, once the process is gone that would write it."""
    some_taken = Machine(takes=8)
    assert "Cannot allocate memory (posted 8/200 WRs)" in (await bench.sees(Row.PARTIAL, some_taken)).value
    async with bench.nodes(consumer=some_taken) as nodes:
        session = await nodes.reach()
        (reading,) = nodes.consumer.processes()
        with pytest.raises(TransferFailed, match="posted 8/"):
            await asyncio.wait_for(session.start(whole()).wait(), 5)
        assert bench.over(reading)
        paint(nodes.arena, nodes.dst, 0)
        assert await nodes.still()
        assert count(nodes.arena, nodes.dst, 7) == 0
        await session.close()
    async with bench.nodes(consumer=Machine(takes=0)) as nodes:  # nothing is: it is asked again until the stall
        session = await nodes.consumer.reach(await nodes.described(), nodes.dst)
        with pytest.raises(TransferFailed, match="no byte came for 1 s"):
            await asyncio.wait_for(session.start(some()).wait(), 5)
        await session.close()


@case(Row.TOO_LONG)
async def too_long(bench: Bench) -> None:
    """kvd's requests are of at most 1 MiB."""
    assert (await bench.sees(Row.TOO_LONG)).value == "ERR_INVALID_ARGS a work request is too long"
    async with bench.nodes() as nodes:
        session = await nodes.reach()
        assert (await session.start(some(SIZE)).wait()).nbytes == SIZE
        await session.close()


@case(Row.HOLDS_LOCK)
async def holds_lock(bench: Bench) -> None:
    """While it waits for a slow peer nothing else runs in its process; kvd's loop goes on."""
    slow = Machine(handshake=0.5)
    assert (await bench.sees(Row.HOLDS_LOCK, slow)).value < 5
    async with bench.nodes(producer=slow) as nodes:
        described = await nodes.described()
        opening = asyncio.create_task(nodes.consumer.reach(described, nodes.dst))
        longest, last = 0.0, time.monotonic()
        while not opening.done():
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        assert longest < 0.4
        await (await opening).close()


@case(Row.BINDS_HOST)
async def binds_host(bench: Bench) -> None:
    """Loopback here. A control port that more could reach than were said is refused, and no public address is taken."""
    assert (await bench.sees(Row.BINDS_HOST)).value == ["0100007F"]
    for host in ("0.0.0.0", "8.8.8.8", "::1", "localhost", "", "255.255.255.255"):
        with pytest.raises(ConfigError, match="mori host"):
            MoriConfig(host=host)
    async with bench.nodes() as nodes:
        await nodes.described()


@case(Row.REMOVES)
async def removes(bench: Bench) -> None:
    """With it a rank lets go of its memory while a peer is silent: nothing is written any more, whatever comes then. A
    process of kvd's is ended instead."""
    assert (await bench.sees(Row.REMOVES, Machine(rate=8192.0))).value == ["IN_PROGRESS", True, 1]
    silent = bench.file("silent")
    slow = Machine(rate=SIZE / 0.4, silent=str(silent))
    async with bench.nodes(consumer=slow, config=replace(FAST, stall=600.0)) as nodes:
        session = await nodes.reach()
        (reading,) = nodes.consumer.processes()
        copy = session.start(whole())
        await nodes.under_way()
        silent.touch()
        await asyncio.wait_for(session.close(), 5)
        (end,) = await asyncio.gather(copy.wait(), return_exceptions=True)
        assert isinstance(end, TransferFailed)
        assert bench.over(reading)
        paint(nodes.arena, nodes.dst, 0)
        silent.unlink()
        assert await nodes.still()
        assert count(nodes.arena, nodes.dst, 7) == 0


@case(Row.PEER_FAILURES)
async def peer_failures(bench: Bench) -> None:
    """Heard long before the stall: the copies fail with the reason that mori has."""
    given_up = bench.file("given_up")
    given_up.write_text("s")
    assert (await bench.sees(Row.PEER_FAILURES, Machine(given_up=str(given_up)))).value == ["s", "PEER_UNREACHABLE"]
    told = bench.file("told")
    patient = MoriConfig(stall=600.0, connect=1.0)
    async with bench.nodes(consumer=Machine(given_up=str(told)), config=patient) as nodes:
        session = await nodes.reach()
        (serving,) = nodes.producer.processes()
        os.kill(serving.pid, signal.SIGKILL)
        copy = session.start(whole())
        told.write_text(serving.name)
        with pytest.raises(TransferFailed, match="PEER_UNREACHABLE"):
            await asyncio.wait_for(copy.wait(), 5)
        await session.close()
