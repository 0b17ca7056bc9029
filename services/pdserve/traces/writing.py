"""The one writer of the store's file: adds spans, prunes the oldest traces. Blocking; one thread at a time."""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdserve.traces import requests, schema
from pdserve.traces.rows import origin_content, span_content
from pdserve.traces.span import Origin, Span

MAX_TRACE_SPANS = 10_000
"""More of one trace are refused: a reader takes a trace as a whole."""
_PRUNE_STEP = 16
"""Traces that are taken at once where room is needed."""
_WAL_SHARE = 8
"""The write-ahead log may be that fraction of the whole before it is folded into the file."""


class Writer:
    """Owns the writing connection. The file and its log together stay below `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int, max_age: float) -> None:
        """Raises ConfigError where the file cannot be used: schema.open_writer."""
        self._database = schema.open_writer(path)
        self._wal = path.with_name(f"{path.name}-wal")
        self._page = int(self._database.execute("PRAGMA page_size").fetchone()[0])
        self._wal_limit = max_bytes // _WAL_SHARE
        # Folding the log in happens between batches: one batch may come on top of the log's limit.
        self._limit = max_bytes - 2 * self._wal_limit
        self._max_age_ns = int(max_age * 1e9)
        self._origins: dict[str, int] = {}
        self._database.execute("PRAGMA wal_autocheckpoint = 0")

    def add(self, spans: Sequence[Span], now_ns: int) -> Counter[str]:
        """Stores them, all or none, and makes room; a span that is there already stays as it was.

        Returns:
            How many were not taken, by reason.

        Raises:
            sqlite3.Error: nothing was stored.
        """
        refused: Counter[str] = Counter()
        traces: dict[str, list[int]] = {}  # id in the table, spans there
        self._check_log()
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for span in spans:
                trace = traces.get(span.trace_id)
                if trace is None:
                    trace = traces[span.trace_id] = self._trace(span.trace_id, now_ns)
                if trace[1] >= MAX_TRACE_SPANS:
                    refused[f"trace of more than {MAX_TRACE_SPANS} spans"] += 1
                elif self._insert(trace[0], span):
                    trace[1] += 1
            self._database.executemany(
                "UPDATE traces SET spans = ? WHERE id = ?", [(count, trace) for trace, count in traces.values()]
            )
            self._make_room(now_ns)
            self._database.execute("COMMIT")
        except BaseException:
            self._origins.clear()  # some of them may have been undone
            self._database.execute("ROLLBACK")
            raise
        self._fold()
        return refused

    def prune(self, now_ns: int) -> None:
        """Takes out what is too old or too much, without anything new.

        Raises:
            sqlite3.Error: nothing was changed.
        """
        self.add((), now_ns)

    def bytes(self) -> int:
        """Of what is stored, without the log."""
        (pages,), (free,) = (self._database.execute(f"PRAGMA {n}").fetchone() for n in ("page_count", "freelist_count"))
        return int(pages - free) * self._page

    def close(self) -> None:
        """Folds the log in and closes; safe twice."""
        self._database.close()

    def _trace(self, trace_id: str, now_ns: int) -> list[int]:
        self._database.execute(
            "INSERT OR IGNORE INTO traces (trace_id, arrived_ns, spans) VALUES (?, ?, 0)", (trace_id, now_ns)
        )
        return list(self._database.execute("SELECT id, spans FROM traces WHERE trace_id = ?", (trace_id,)).fetchone())

    def _insert(self, trace: int, span: Span) -> bool:
        row = (
            trace, span.span_id, span.parent_id, self._origin(span.origin), span.name, span.kind, span.start_ns,
            span.end_ns, span.status, span_content(span),
        )  # fmt: skip
        new = self._database.execute(f"INSERT OR IGNORE INTO spans VALUES ({_marks(len(row))})", row).rowcount == 1
        request = requests.of(span)
        if new and request is not None:
            values = (  # in the order of the table's columns
                trace, span.span_id, request.start_ns, request.request_id, request.ttft, request.e2e, request.mode,
                request.transport, request.model, request.outcome, request.reason, request.fallbacks,
                request.continuations, request.input_tokens, request.output_tokens, request.kv_bytes,
                msgspec.json.encode(request.parts).decode(), request.unattributed, request.failed_after,
                request.failed_in, msgspec.json.encode(request.failed_or_later).decode(),
            )  # fmt: skip
            self._database.execute(f"INSERT INTO requests VALUES ({_marks(len(values))})", values)
        return new

    def _origin(self, origin: Origin) -> int:
        content = origin_content(origin)
        known = self._origins.get(content)
        if known is None:
            self._database.execute(
                "INSERT OR IGNORE INTO origins (service, instance, content) VALUES (?, ?, ?)",
                (origin.service, origin.instance, content),
            )
            row = self._database.execute("SELECT id FROM origins WHERE content = ?", (content,)).fetchone()
            known = self._origins[content] = int(row[0])
        return known

    def _make_room(self, now_ns: int) -> None:
        self._take_out("WHERE arrived_ns < ? ORDER BY id", (now_ns - self._max_age_ns,))
        while self.bytes() > self._limit and self._take_out("ORDER BY id LIMIT ?", (_PRUNE_STEP,)):
            pass

    def _take_out(self, which: str, values: Sequence[int]) -> bool:
        """Removes traces with all that hangs on them; whether there were any."""
        traces = self._database.execute(f"SELECT id FROM traces {which}", values).fetchall()
        if not traces:
            return False
        for table, column in (("spans", "trace"), ("requests", "trace"), ("traces", "id")):
            self._database.executemany(f"DELETE FROM {table} WHERE {column} = ?", traces)
        self._database.execute(
            "DELETE FROM origins WHERE NOT EXISTS (SELECT 1 FROM spans WHERE spans.origin = origins.id)"
        )
        self._origins.clear()
        return True

    def _fold(self) -> None:
        """Gives free pages back and folds the log in, where it has grown.

        A reader may hold the log for as long as it asks. It is waited for only when the log is full; what it still
        holds then makes the next batch fail, so that the log does not grow on.
        """
        size = self._log_bytes()
        if size > self._wal_limit // 2:
            patience = schema.BUSY_S if size > self._wal_limit else 0.0
            self._database.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
            self._database.execute("PRAGMA incremental_vacuum").fetchall()
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _check_log(self) -> None:
        """Raises sqlite3.OperationalError where the log is full and readers keep it so."""
        if self._log_bytes() > self._wal_limit:
            self._fold()
            if self._log_bytes() > self._wal_limit:
                raise sqlite3.OperationalError("its log is full, and a reader holds it")

    def _log_bytes(self) -> int:
        return self._wal.stat().st_size if self._wal.exists() else 0


def _marks(count: int) -> str:
    return ", ".join("?" * count)
