"""A process ends in two stages, and never goes on with a dead part."""

import asyncio
import os
import signal

import pytest
from structlog.testing import capture_logs

from pdserve.rpc.errors import EngineDied, PdserveError
from pdserve.runtime.lifecycle import Shutdown, Tasks, serve_until_shutdown
from pdserve.runtime.race import unless


class Work:
    """Something to drain, under the test's control."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.done = asyncio.Event()
        self.cancelled = False

    async def drain(self) -> None:
        """Ends with `done`."""
        self.begun.set()
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def forever() -> None:
    """A task that goes on."""
    await asyncio.Event().wait()


async def fails(error: BaseException) -> None:
    """A task that does not."""
    raise error


async def test_the_first_request_drains() -> None:
    """The process closes when what it has is done, not before."""
    shutdown, work = Shutdown(), Work()
    async with Tasks() as tasks:
        tasks.start("background", forever())
        serving = asyncio.create_task(serve_until_shutdown(shutdown, tasks.failed(), work.drain, 30.0))
        shutdown.request()
        await work.begun.wait()
        assert not serving.done()
        work.done.set()
        await serving
    assert not work.cancelled


async def test_the_second_request_stops() -> None:
    """Whoever asks twice does not wait for the drain."""
    shutdown, work = Shutdown(), Work()
    async with Tasks() as tasks:
        serving = asyncio.create_task(serve_until_shutdown(shutdown, tasks.failed(), work.drain, 30.0))
        shutdown.request()
        await work.begun.wait()
        shutdown.request()
        await serving
    assert work.cancelled


async def test_a_drain_has_a_deadline() -> None:
    """A request that never ends does not keep the process."""
    shutdown, work = Shutdown(), Work()
    shutdown.request()
    async with Tasks() as tasks:
        with capture_logs() as logs:
            await serve_until_shutdown(shutdown, tasks.failed(), work.drain, 0.01)
    assert work.cancelled
    assert [line["event"] for line in logs] == ["drain_cut_short"]


async def test_signals_are_requests() -> None:
    """SIGTERM drains, SIGINT after it stops."""
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()
    shutdown.on_signals()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(shutdown.draining.wait(), 5)
        assert not shutdown.stopping.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(shutdown.stopping.wait(), 5)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@pytest.mark.parametrize("draining", [False, True])
async def test_a_dead_task_ends_the_process(draining: bool) -> None:
    """Serving and draining alike, with the error that killed it, and said in the log."""
    shutdown, work = Shutdown(), Work()
    die = asyncio.Event()

    async def background() -> None:
        await die.wait()
        raise EngineDied("no more engine")

    with capture_logs() as logs:
        async with Tasks() as tasks:
            tasks.start("engine", background())
            serving = asyncio.create_task(serve_until_shutdown(shutdown, tasks.failed(), work.drain, 30.0))
            if draining:
                shutdown.request()
                await work.begun.wait()
            die.set()
            with pytest.raises(EngineDied, match="no more engine"):
                await serving
    assert ("task_died", "engine") in [(line["event"], line.get("task")) for line in logs]


async def test_any_end_of_a_background_task_is_a_death() -> None:
    """Returning, being cancelled and failing oddly are all defects, with the task's name."""
    async with Tasks() as tasks:
        tasks.start("quitter", asyncio.sleep(0))
        with pytest.raises(PdserveError, match="quitter returned"):
            await tasks.failed()
    async with Tasks() as tasks:
        tasks.start("odd", fails(KeyError("x")))
        with pytest.raises(PdserveError, match="odd ended: KeyError"):
            await tasks.failed()
    async with Tasks() as tasks:
        tasks.start("hit", forever()).cancel()
        with pytest.raises(PdserveError, match="hit was cancelled"):
            await tasks.failed()


async def test_closing_cancels_and_waits() -> None:
    """No task outlives its owner, and an end while closing is no death."""
    cleaned = asyncio.Event()

    async def background() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    async with Tasks() as tasks:
        tasks.start("background", background())
        await asyncio.sleep(0)
    assert cleaned.is_set()
    await tasks.aclose()


async def test_unless_gives_the_work_its_result() -> None:
    """Trouble that has not come is cancelled; trouble that returns is none."""
    assert await unless(asyncio.sleep(0, "done"), forever()) == "done"
    assert await unless(asyncio.sleep(0.01, "done"), asyncio.sleep(0)) == "done"


async def test_unless_raises_the_trouble_after_the_work_has_cleaned_up() -> None:
    """The order matters: blocks are back when the error is raised."""
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    with pytest.raises(EngineDied):
        await unless(work(), fails(EngineDied("x")))
    assert cleaned.is_set()


async def test_unless_passes_on_what_the_work_raises() -> None:
    """Its own error, not the trouble's."""
    with pytest.raises(EngineDied):
        await unless(fails(EngineDied("x")), forever())


async def test_unless_cancelled_leaves_nothing_running() -> None:
    """Both are cancelled with it."""
    began, cancelled = asyncio.Event(), []

    async def side(name: str) -> None:
        began.set()
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    task = asyncio.create_task(unless(side("work"), side("trouble")))
    await began.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == ["trouble", "work"]
