"""The process that draws, in this one: what it does with what its proxy has left behind.

Real: the socket, its exporter. Fakes: the collector, over a real port; the proxy.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdserve.proxy.tracing.child import Drawer
from pdserve.proxy.tracing.wire import pack
from tests.unit.proxy.records import OFFSET, TRACE, record
from tests.unit.telemetry.collector import Collector


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """Served."""
    collector = Collector()
    await collector.start()
    yield collector
    await collector.kill()


async def test_a_killed_proxys_last_records_are_drawn(collector: Collector) -> None:
    """Those that waited in the socket when a proxy was killed that had not read our last report: the kernel says first
    that the connection was reset, and has them still."""
    ours, proxys = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, proxys:
        drawing = asyncio.create_task(Drawer(ours, collector.endpoint, 0.02).run())
        await asyncio.sleep(0)  # it has said its first report, which nobody reads
        for number in range(1, 4):
            proxys.send(pack(record(trace=replace(TRACE, trace_id=f"{number:032x}")), OFFSET))
        proxys.close()
        await asyncio.wait_for(drawing, 10)
    assert set(collector.traces()) == {f"{number:032x}" for number in range(1, 4)}
