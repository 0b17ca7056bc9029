"""What the matrix reads in the proxy's log is in the trace too: the collector is told the same causes.

A fleet of its own, whose proxy tries nothing twice, so that requests do fail. Fake: the collector, over a real port.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Span
from tests.forked.forks import Zygote
from tests.matrix import settings
from tests.matrix.case import Alone, run
from tests.matrix.cells import Cell
from tests.matrix.faults import Fault
from tests.matrix.fleet import running
from tests.matrix.phases import Phase
from tests.unit.telemetry.collector import Collector

_ONCE = ("--on-failure=fail", "--retries=0", "--continuations=0")
_CELLS = (
    Cell(Phase.STREAMING, Fault.NONE, "write"),
    Cell(Phase.POSTED, Fault.CANCEL, "read"),
    Cell(Phase.QUEUED, Fault.CANCEL, "write"),
    Cell(Phase.POSTED, Fault.LINK_FAILS, "read"),
    Cell(Phase.POSTED, Fault.LINK_FAILS, "write"),
    Cell(Phase.COMPUTING, Fault.P_KILLED, "read"),
    Cell(Phase.STREAMING, Fault.D_KILLED, "write"),
)
"""Each leaves the fleet to be healed in tenths of a second."""


def reasons(spans: list[Span]) -> tuple[str, list[str]]:
    """Of a trace: the request's, and each attempt's; empty where it went well."""
    (root,) = [span for span in spans if span.name == names.REQUEST]
    attempts = sorted((span for span in spans if span.name == names.ATTEMPT), key=lambda span: span.start_ns)
    return _reason(root), [_reason(attempt) for attempt in attempts]


def _reason(span: Span) -> str:
    said = str(span.attributes.get(names.ERROR_TYPE, ""))
    assert span.status.failed == bool(said), span
    assert span.status.message.partition(":")[0] == said, span
    return said


@pytest.mark.asyncio(loop_scope="session")
async def test_the_trace_gives_the_cause_that_the_record_gives(
    monkeypatch: pytest.MonkeyPatch, alone: Alone, zygote: Zygote
) -> None:
    """One request is answered, two are cancelled, four fail: the root span and each attempt have the reasons of the one
    record, and the client got that reason."""
    collector, made = Collector(), settings.addresses
    await collector.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)

    def once(folder: Path) -> settings.Addresses:
        where = made(folder)
        proxy = where.specs["proxy"]
        return replace(where, specs={**where.specs, "proxy": replace(proxy, argv=(*proxy.argv, *_ONCE))})

    monkeypatch.setattr(settings, "addresses", once)
    records: list[tuple[Cell, dict[str, Any], str]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="traced") as folder:
            async with running(zygote, Path(folder)) as fleet:
                for cell in _CELLS:
                    seen = await run(fleet, cell, alone)
                    (record,) = seen.ended
                    records.append((cell, record, seen.answer.error.reason if seen.answer.error else ""))
                    await fleet.heal()
                wanted = {record["trace_id"] for _, record, _ in records}
                await collector.until(lambda: wanted <= collector.traces().keys())
        traces = collector.traces()
        for cell, record, got in records:
            root, attempts = reasons(traces[record["trace_id"]])
            assert root == record["reason"] == got, (cell, record)
            assert attempts == [attempt["reason"] for attempt in record["attempts"]], (cell, record)
        outcomes = [record["outcome"] for _, record, _ in records]
        assert outcomes == ["finished", *["cancelled"] * 2, *["failed"] * 4], [str(cell) for cell in _CELLS]
    finally:
        await collector.kill()
