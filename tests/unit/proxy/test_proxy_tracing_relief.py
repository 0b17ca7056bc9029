"""The two processes that draw: the second takes over while the first is behind, and nothing is lost between them.

Real: the processes, their sockets and exporters. Fakes: the collector, over a real port; the records.
"""

import os
import signal

from structlog.testing import capture_logs

from pdserve.proxy.tracing.apart import command
from pdserve.proxy.tracing.relief import Relieved
from pdserve.runtime.log import LogFormat, LogLevel
from pdserve.runtime.telemetry.span import Counts
from tests.unit.proxy.apart_rig import COMMAND, WHOLE, At, alive, numbered
from tests.unit.telemetry.collector import Collector
from tests.waiting import until

URGENT = command(0.02, LogFormat.JSON, LogLevel.INFO, urgent=True)


async def test_the_second_takes_over_while_the_first_is_behind(collector: Collector) -> None:
    """The first gets no turn, as on a full machine: one line says so, later records are drawn by the second, and when
    the first has caught up the next is its own again. All arrive, and the numbers are of both."""
    async with Relieved(COMMAND, URGENT, At(), late=0.2) as sink:
        await until(lambda: sink.first.ready)
        os.kill(sink.first.pid, signal.SIGSTOP)
        sink(numbered(1))
        await until(lambda: sink.first.behind(0.2))
        with capture_logs() as lines:
            sink(numbered(2))  # the second is not there yet: this one waits at the first
            assert sink.second is not None
            await until(lambda: sink.second is not None and sink.second.ready)
            sink(numbered(3))
            await collector.until(lambda: f"{3:032x}" in collector.traces(), 40.0)
        assert [line["event"] for line in lines] == ["traces_behind"]
        assert set(collector.traces()) == {f"{3:032x}"}
        assert sink.first.unread == 2
        os.kill(sink.first.pid, signal.SIGCONT)
        await until(lambda: sink.first.unread == 0)
        sink(numbered(4))
        assert sink.first.unread == 1
        await until(lambda: sink.counts == Counts(exported=4 * WHOLE, dropped=0, failed=0))
        assert os.sched_getscheduler(sink.second.pid) == os.SCHED_BATCH
        pids = (sink.first.pid, sink.second.pid)
    assert set(collector.traces()) == {f"{number:032x}" for number in range(1, 5)}
    assert not any(map(alive, pids))


async def test_a_full_socket_calls_the_second(collector: Collector) -> None:
    """Long before a second has passed, where there is no room any more."""
    async with Relieved(COMMAND, COMMAND, At(), late=3600.0) as sink:
        await until(lambda: sink.first.ready)
        os.kill(sink.first.pid, signal.SIGSTOP)
        number = 0
        while sink.second is None:
            number += 1
            sink(numbered(number))
            assert number < 2000
        await until(lambda: sink.second is not None and sink.second.ready)
        sink(numbered(3000))
        await collector.until(lambda: set(collector.traces()) == {f"{3000:032x}"})
        os.kill(sink.first.pid, signal.SIGCONT)


async def test_who_keeps_up_stays_alone(collector: Collector) -> None:
    """There is no second process without need. Fifty records have room in the socket, however late it looks."""
    async with Relieved(COMMAND, URGENT, At(), late=60.0) as sink:
        await until(lambda: sink.first.ready)
        for number in range(1, 51):
            sink(numbered(number))
        await until(lambda: sink.counts == Counts(exported=50 * WHOLE, dropped=0, failed=0))
        assert sink.second is None
