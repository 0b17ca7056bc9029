"""The readers of the store's file: one connection a thread, every question with a deadline. Blocking."""

import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pdserve.rpc.errors import DeadlinePassed
from pdserve.traces import ids, rows, schema
from pdserve.traces.percentiles import Timing
from pdserve.traces.requests import Request
from pdserve.traces.search import Search, has_tags
from pdserve.traces.span import KINDS, Origin, Span

MAX_SPANS = 50_000
"""In one answer: a search that finds more ends with the trace in which it came to that."""
_STEPS = 10_000
"""SQLite's steps between two looks at the clock."""
_REQUEST = (
    "t.trace_id, r.span_id, r.start_ns, r.request_id, r.ttft, r.e2e, r.mode, r.transport, r.model, r.outcome, r.reason,"
    " r.fallbacks, r.continuations, r.input_tokens, r.output_tokens, r.kv_bytes, r.parts, r.unattributed,"
    " r.failed_after, r.failed_in, r.failed_or_later"
)
_SPAN = "s.span_id, s.parent_id, s.name, s.kind, s.start_ns, s.end_ns, s.status, s.content"
_PARTS = msgspec.json.Decoder(dict[str, float]).decode
_NAMES = msgspec.json.Decoder(tuple[str, ...]).decode


class Reader:
    """A connection that reads; used by one thread, in which it was made."""

    def __init__(self, path: Path, timeout: float) -> None:
        """`timeout`: seconds that one question may take."""
        self._database = schema.open_reader(path)
        self._timeout = timeout
        self._until = 0.0
        self._database.set_progress_handler(lambda: time.monotonic() > self._until, _STEPS)

    def close(self) -> None:
        """Safe twice."""
        self._database.close()

    def services(self) -> list[str]:
        """Names of all services, sorted."""
        return [row[0] for row in self._ask("SELECT DISTINCT service FROM origins ORDER BY service")]

    def operations(self, service: str, kind: str = "") -> list[tuple[str, str]]:
        """Names of spans with their kind, sorted; `kind` empty: of all kinds."""
        found = self._ask(
            "SELECT DISTINCT s.name, s.kind FROM spans s WHERE s.origin IN (SELECT id FROM origins WHERE service = ?)"
            " ORDER BY s.name, s.kind",
            (service,),
        )
        return [(name, KINDS[number]) for name, number in found if not kind or KINDS[number] == kind]

    def find(self, search: Search) -> list[str]:
        """Ids of the traces that are meant, that with the newest of the spans meant first."""
        where, values = ["s.start_ns BETWEEN ? AND ?"], [search.start_ns, search.end_ns]
        text: list[Any] = []
        if search.service:
            where.append("s.origin IN (SELECT id FROM origins WHERE service = ?)")
            text.append(search.service)
        if search.operation:
            where.append("s.name = ?")
            text.append(search.operation)
        where.append("s.end_ns - s.start_ns BETWEEN ? AND ?")
        columns = f"{_SPAN}, s.origin" if search.tags else "1"
        found: dict[int, None] = {}
        origins: dict[int, Origin] = {}
        rows_ = self._ask(
            f"SELECT s.trace, {columns} FROM spans s INDEXED BY spans_by_start WHERE {' AND '.join(where)}"
            " ORDER BY s.start_ns DESC",
            (*values, *text, search.min_ns, search.max_ns),
        )
        for trace, *row in rows_:
            if trace in found:
                continue
            if search.tags and not has_tags(
                rows.span("", tuple(row[:-1]), self._origin(row[-1], origins)), search.tags
            ):
                continue
            found[trace] = None
            if len(found) == search.limit:
                break
        rows_.close()
        ids = (self._ask("SELECT trace_id FROM traces WHERE id = ?", (trace,)).fetchone() for trace in found)
        return [row[0] for row in ids if row is not None]  # a trace may have been pruned in between

    def traces(self, trace_ids: Iterable[str]) -> list[list[Span]]:
        """The spans of each trace that is there, by start; at most about MAX_SPANS in all."""
        found: list[list[Span]] = []
        origins: dict[int, Origin] = {}
        count = 0
        for trace_id in trace_ids:
            answer = self._ask(
                f"SELECT s.origin, {_SPAN} FROM traces t JOIN spans s ON s.trace = t.id WHERE t.trace_id = ?"
                " ORDER BY s.start_ns, s.end_ns DESC",
                (trace_id,),
            ).fetchall()
            spans = [rows.span(trace_id, tuple(row), self._origin(origin, origins)) for origin, *row in answer]
            if spans:
                found.append(spans)
            count += len(spans)
            if count >= MAX_SPANS:
                break
        return found

    def requests(
        self, limit: int, *, mode: str = "", outcome: str = "", model: str = "", called: str = ""
    ) -> list[Request]:
        """The newest requests; `called`: an id as somebody typed it (`ids`), a whole one before what only begins so."""
        where, values = ["1"], list[Any]()
        for column, value in (("mode", mode), ("outcome", outcome), ("model", model)):
            if value:
                where.append(f"r.{column} = ?")
                values.append(value)
        if not called:
            return self._requests(limit, where, values)
        meant = ids.read(called)
        marks = ", ".join("?" * len(meant.exact))
        named = f"(r.request_id IN ({marks}) OR t.trace_id IN ({marks}))"
        found = self._requests(limit, [*where, named], [*values, *meant.exact, *meant.exact])
        if found or not meant.beginning:
            return found
        begins = "((r.request_id >= ? AND r.request_id < ?) OR (t.trace_id >= ? AND t.trace_id < ?))"
        bounds = [meant.beginning, f"{meant.beginning}~"]  # ~ comes after every digit
        return self._requests(limit, [*where, begins], [*values, *bounds, *bounds])

    def _requests(self, limit: int, where: Sequence[str], values: Sequence[Any]) -> list[Request]:
        answer = self._ask(
            f"SELECT {_REQUEST} FROM requests r JOIN traces t ON t.id = r.trace WHERE {' AND '.join(where)}"
            " ORDER BY r.start_ns DESC LIMIT ?",
            (*values, limit),
        )
        return [_request(row) for row in answer]

    def requests_of(self, trace_id: str) -> list[Request]:
        """The requests of one trace, the earliest first."""
        answer = self._ask(
            f"SELECT {_REQUEST} FROM traces t JOIN requests r ON r.trace = t.id WHERE t.trace_id = ?"
            " ORDER BY r.start_ns",
            (trace_id,),
        )
        return [_request(row) for row in answer]

    def timings(self, start_ns: int, mode: str = "") -> list[Timing]:
        """Of the requests since then that had a first token."""
        answer = self._ask(
            "SELECT start_ns, ttft, parts, unattributed FROM requests WHERE start_ns >= ? AND ttft IS NOT NULL"
            + (" AND mode = ?" if mode else ""),
            (start_ns, mode) if mode else (start_ns,),
        )
        return [Timing(start / 1000, ttft, _PARTS(parts), rest) for start, ttft, parts, rest in answer]

    def dependencies(self, start_ns: int, end_ns: int) -> list[tuple[str, str, int]]:
        """Parent service, child service, how many spans of the one have a parent of the other."""
        return self._ask(
            "SELECT po.service, co.service, count(*) FROM spans c JOIN spans p ON p.trace = c.trace"
            " AND p.span_id = c.parent_id JOIN origins po ON po.id = p.origin JOIN origins co ON co.id = c.origin"
            " WHERE c.start_ns BETWEEN ? AND ? AND po.service <> co.service GROUP BY 1, 2 ORDER BY 1, 2",
            (start_ns, end_ns),
        ).fetchall()

    def begin(self) -> None:
        """Starts the clock of one question; everything asked until `end` sees the store as it is now."""
        self._until = time.monotonic() + self._timeout
        self._database.execute("BEGIN")

    def end(self) -> None:
        """Lets go of what `begin` has held."""
        self._until = time.monotonic() + self._timeout
        self._database.execute("ROLLBACK")

    def _ask(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._database.execute(sql, values)

    def _origin(self, number: int, known: dict[int, Origin]) -> Origin:
        if number not in known:
            (content,) = self._ask("SELECT content FROM origins WHERE id = ?", (number,)).fetchone()
            known[number] = rows.origin(content)
        return known[number]


def _request(row: tuple[Any, ...]) -> Request:
    *plain, parts, unattributed, failed_after, failed_in, or_later = row
    return replace(
        Request(*plain),
        parts=_PARTS(parts),
        unattributed=unattributed,
        failed_after=failed_after,
        failed_in=failed_in,
        failed_or_later=_NAMES(or_later),
    )


def explain(error: sqlite3.OperationalError, timeout: float) -> Exception:
    """What a reader's error means: the deadline, where the clock has interrupted it."""
    if "interrupted" in str(error):
        return DeadlinePassed(f"the trace store has not answered within {timeout:g} s; ask for less")
    return error
