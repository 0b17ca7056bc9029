"""The process that draws, as the proxy has it: what is sent arrives drawn, and whatever happens is counted.

Real: the process, its socket, its exporter. Fakes: the collector, over a real port; the records.
"""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.apart import Apart
from pdserve.proxy.tracing.child import NICE
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.wire import LARGEST, pack
from pdserve.proxy.types import Mode
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.log import LogFormat, LogLevel
from pdserve.runtime.telemetry.span import Counts
from tests.unit.proxy.apart_rig import CALM, COMMAND, WHOLE, At, alive, numbered, ready
from tests.unit.proxy.records import OFFSET, TRACE, record
from tests.unit.proxy.undisturbed import command
from tests.unit.telemetry.collector import Collector
from tests.waiting import until

# -- what arrives -------------------------------------------------------------------------------


async def test_a_trace_is_drawn_as_it_would_be_here(collector: Collector) -> None:
    """Each span of a READ, a WRITE and a failed request, in every field; and the numbers become true by themselves."""
    records = [record(mode) for mode in Mode]
    records.append(record(reason="ENGINE_DIED", error="gone, with half a pair \ud800", finished=None))
    drawn = [
        spans_of(one, OFFSET) for one in (*records[:2], replace(records[2], error="gone, with half a pair \\ud800"))
    ]
    async with ready() as apart:
        for spans, one in zip(drawn, records, strict=True):
            collector.spans.clear()
            apart(one)
            await collector.until(lambda spans=spans: len(collector.spans) == len(spans))  # type: ignore[misc]
            got = {received.span.span_id.hex(): received.value() for received in collector.spans}
            assert got == {span.span_id: span for span in spans}
        count = sum(map(len, drawn))
        await until(lambda: apart.counts == Counts(exported=count, dropped=0, failed=0))


async def test_what_comes_before_the_process_is_there_waits(collector: Collector) -> None:
    """A record of the first moment is traced like any other."""
    async with Apart(COMMAND, At()) as apart:
        await until(lambda: apart.pid > 0)
        assert not apart.ready
        apart(record())
        await collector.until(lambda: len(collector.spans) == WHOLE)


async def test_closing_sends_what_there_is(collector: Collector) -> None:
    """All of many at once, though no batch was due; then the process is gone, and the numbers stand."""
    async with Apart(command(3600.0, LogFormat.JSON, LogLevel.INFO), At()) as apart:
        await until(lambda: apart.ready)
        pid = apart.pid
        for number in range(1, 31):
            apart(numbered(number))
    assert len(collector.traces()) == 30
    assert apart.counts == Counts(exported=30 * WHOLE, dropped=0, failed=0)
    assert not alive(pid)
    apart(record())
    assert apart.counts.dropped == WHOLE, "there is nobody any more"
    await apart.aclose()


async def test_a_signal_to_the_group_ends_nothing(collector: Collector) -> None:
    """Ctrl-C and a supervisor's SIGTERM reach both: the process still draws until the proxy closes."""
    async with ready() as apart:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(apart.pid, number)
        apart(record())
        await collector.until(lambda: len(collector.spans) == WHOLE)


# -- what does not ------------------------------------------------------------------------------


async def test_a_full_socket_drops_and_counts(collector: Collector) -> None:
    """A process that stands still: nobody waits for it, what finds no room is dropped and said once. When it goes on,
    what had room arrives, and every span is in one of the numbers."""
    async with ready() as apart:
        os.kill(apart.pid, signal.SIGSTOP)
        with capture_logs() as lines:
            for number in range(1, 2001):
                apart(numbered(number))
        (line,) = lines
        assert (line["event"], line["running"]) == ("traces_dropped", True)
        dropped = apart.counts.dropped
        assert 0 < dropped < 2000 * WHOLE
        assert dropped % WHOLE == 0
        os.kill(apart.pid, signal.SIGCONT)
        await until(lambda: apart.counts == Counts(exported=2000 * WHOLE - dropped, dropped=dropped, failed=0))
        assert len(collector.spans) == apart.counts.exported
        apart(numbered(3000))
        await collector.until(lambda: f"{3000:032x}" in collector.traces())


async def test_the_longest_record(collector: Collector) -> None:
    """One of exactly LARGEST bytes arrives whole; one byte more is dropped, and the next usual one arrives."""

    def of(size: int) -> Ended:
        one = record(reason="ENGINE_DIED", error="x" * 60_000)
        short = size - len(pack(one, OFFSET))
        return replace(one, error=one.error + "x" * short)

    assert [len(pack(of(size), OFFSET)) for size in (LARGEST, LARGEST + 1)] == [LARGEST, LARGEST + 1]
    async with ready() as apart:
        apart(of(LARGEST))
        await collector.until(lambda: bool(collector.spans))
        (root,) = [one.value() for one in collector.spans if one.value().parent_id == TRACE.parent_id]
        assert root.status.message == f"ENGINE_DIED: {of(LARGEST).error}"
        assert apart.counts.dropped == 0
        apart(of(LARGEST + 1))
        assert apart.counts.dropped > 0
        apart(numbered(7))
        await collector.until(lambda: f"{7:032x}" in collector.traces())


async def test_a_process_that_dies_is_counted_and_replaced(collector: Collector) -> None:
    """Killed with records that it has not read, and with spans that it has not sent: both have failed, one line says
    so, and the next request's trace arrives."""
    async with Apart(command(3600.0, LogFormat.JSON, LogLevel.INFO), At()) as apart:
        await until(lambda: apart.ready)
        first = apart.pid
        apart(numbered(1))
        await until(lambda: apart.unread == 0)  # it is drawn, and waits for its batch
        os.kill(first, signal.SIGSTOP)
        for number in range(2, 5):
            apart(numbered(number))
        with capture_logs() as lines:
            os.kill(first, signal.SIGKILL)
            await until(lambda: apart.counts.failed > 0)
            assert apart.counts == Counts(exported=0, dropped=0, failed=4 * WHOLE)
            await until(lambda: apart.ready)
            assert apart.pid not in (0, first)
            apart(numbered(5))
        assert not alive(first), "it was reaped"
        (line,) = lines
        assert (line["event"], line["how"], line["lost"]) == ("traces_process_ended", "by signal 9", 4 * WHOLE)
    assert apart.counts == Counts(exported=WHOLE, dropped=0, failed=4 * WHOLE)
    assert set(collector.traces()) == {f"{5:032x}"}


async def test_a_process_that_does_not_end_is_killed(collector: Collector) -> None:
    """The stop of the proxy has an end; what was on its way has failed."""
    async with ready() as apart:
        pid = apart.pid
        os.kill(pid, signal.SIGSTOP)
        apart(record())
        with capture_logs() as lines:
            await apart.aclose(0.2)
    assert [line["event"] for line in lines] == ["traces_cut_off", "traces_closed"]
    assert apart.counts == Counts(exported=0, dropped=0, failed=WHOLE)
    assert not alive(pid)


async def test_one_that_cannot_be_started_harms_nobody() -> None:
    """It is tried again, ever more rarely; records are dropped meanwhile."""
    with capture_logs() as lines:
        async with Apart(["/nowhere/to/be/found"], At()) as apart:
            await until(lambda: len(lines) >= 2)
            apart(record())
            assert apart.counts == Counts(exported=0, dropped=WHOLE, failed=0)
    tried = [line for line in lines if line["event"] == "traces_process_ended"]
    assert all(line["how"].startswith("not started: No such file") for line in tried)
    assert [line["again_in"] for line in tried[:2]] == [0.1, 0.2]


async def test_a_wrong_variable_is_found_behind_a_first_death(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A first process that died before it could read its variables does not turn them into something to be tried for
    ever."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    once = ["sh", "-c", 'mkdir "$0" && exit 1; exec "$@"', str(tmp_path / "died"), *COMMAND]
    async with Apart(once, At()) as apart:
        with pytest.raises(ConfigError, match="soon"):
            await asyncio.wait_for(apart.failed(), 30)
        assert not apart.ready


# -- what it is ---------------------------------------------------------------------------------


async def test_it_has_no_file_of_the_proxys(collector: Collector) -> None:
    """Of ours it has stdout and stderr alone: no listening socket, not even one that may be inherited."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    os.set_inheritable(server.sockets[0].fileno(), True)
    async with server, ready() as apart:
        ours, its = files(os.getpid()), files(apart.pid)
        both = {name for fd, name in its.items() if fd > 2 and not name.startswith("anon_inode:")} & {*ours.values()}
        assert both == set()
        assert its[0] not in ours.values(), "its end of the socket is its own"
        assert its[1] == os.devnull
        assert ours[server.sockets[0].fileno()].startswith("socket:"), "this is where it would be seen"


@pytest.mark.timeout(240)
async def test_whatever_else_there_is_to_do_comes_first(collector: Collector) -> None:
    """Each of its threads, the exporter's too; and it is in the proxy's group, so that who ends that ends it."""
    async with Apart(CALM, At()) as apart:
        await until(lambda: apart.ready, 100.0)
        apart(record())
        await collector.until(lambda: len(collector.spans) == WHOLE, 100.0)
        threads = [int(one) for one in os.listdir(f"/proc/{apart.pid}/task")]
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        assert len(threads) > 1
        assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {min(usual + NICE, 19)}
        assert {os.sched_getscheduler(one) for one in threads} == {os.SCHED_IDLE}
        assert os.getpgid(apart.pid) == os.getpgid(0)


def files(pid: int) -> dict[int, str]:
    """What a process has open, by number."""
    found: dict[int, str] = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


async def test_it_ends_when_the_proxy_is_killed(collector: Collector) -> None:
    """SIGKILL of who has started it, in the moment after a record: the trace still arrives, and nothing stays."""
    code = (
        "import asyncio\n"
        "from tests.unit.proxy.apart_rig import ready\n"
        "from tests.unit.proxy.records import record\n"
        "async def main():\n"
        "    async with ready() as apart:\n"
        "        apart(record())\n"
        "        print(apart.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    proxy = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert proxy.stdout is not None
    pid = int(await proxy.stdout.readline())
    proxy.kill()
    await proxy.wait()
    await collector.until(lambda: len(collector.spans) == WHOLE)
    await until(lambda: not alive(pid))
