"""The store's file: what goes in comes out, it stays within its bounds, and it is nobody else's."""

import collections
import random
import sqlite3
from pathlib import Path

import pytest

from pdserve.rpc.errors import ConfigError, DeadlinePassed
from pdserve.traces import otlp, rows, schema, writing
from pdserve.traces.reading import Reader, explain
from pdserve.traces.search import Search
from pdserve.traces.span import Span
from pdserve.traces.store import Store
from pdserve.traces.writing import Writer
from tests.unit.traces import made
from tests.unit.traces.conftest import File, StoppedClock

NOW = made.START + 60 * 10**9
ALWAYS = (0, (1 << 63) - 1)


def spans(*traces: made.Made) -> tuple[Span, ...]:
    return otlp.decode(made.export(*traces)).spans


def search(**fields: object) -> Search:
    return Search(*ALWAYS, **fields)  # type: ignore[arg-type]  # fields of several types


def test_what_goes_in_comes_out(file: File) -> None:
    """A trace comes back with every span as it was, sorted by start, and the request's row beside it."""
    given = spans(made.request(1), made.failed(2, made.START - 1))
    assert not file.writer().add(given, NOW)
    reader = file.reader()
    (first,), (second,) = reader.traces([made.Made(1).hex]), reader.traces([made.Made(2).hex])
    assert {span.span_id: span for span in (*first, *second)} == {span.span_id: span for span in given}
    assert [span.start_ns for span in first] == sorted(span.start_ns for span in first)
    assert [row.request_id for row in reader.requests(10)] == ["cmpl-1", "cmpl-2"]
    (row,) = reader.requests_of(made.Made(2).hex)
    assert (row.outcome, row.reason, row.ttft, row.unattributed) == ("failed", "NO_ENGINES", None, None)
    assert reader.services() == [made.DECODE, made.KVD, made.PREFILL, made.PROXY]
    assert ("pdserve.kv.wait", "internal") in reader.operations(made.DECODE)
    assert reader.operations(made.PROXY, "server") == [("pdserve.request", "server")]


def test_a_trace_that_comes_in_pieces_is_one(file: File) -> None:
    """Services export on their own, in any order; a piece that is sent again changes nothing."""
    given = list(spans(made.request(1)))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random.Random(seed).shuffle(given)
    writer = file.writer()
    for _ in range(2):
        for span in given:
            writer.add([span], NOW)
    reader = file.reader()
    (found,) = reader.traces([made.Made(1).hex])
    assert len(found) == len(given)
    assert len(reader.requests(10)) == 1


def test_it_is_there_after_a_restart(file: File) -> None:
    """A store that is opened again has what the one before had."""
    writer = file.writer()
    writer.add(spans(made.request(1)), NOW)
    writer.close()
    file.writer()
    assert file.reader().find(search()) == [made.Made(1).hex]


def test_searches(file: File) -> None:
    """By service, operation, duration, tags of the span, its status, its events or its resource, and by time; newest
    first, no more than asked for."""
    second = 10**9
    traces = [made.request(n, start=made.START + n * second) for n in (1, 2, 3)]
    file.writer().add(spans(*traces, made.failed(4, made.START + 4 * second)), NOW)
    reader = file.reader()

    def found(**fields: object) -> list[int]:
        return [int(trace_id[-2:], 16) for trace_id in reader.find(search(**fields))]

    assert found() == [4, 3, 2, 1]
    assert found(limit=2) == [4, 3]
    assert found(service=made.KVD) == [3, 2, 1]
    assert found(service="nobody") == []
    assert found(operation="pdserve.kv.wait", limit=1) == [3]
    assert found(service=made.PROXY, operation="pdserve.kv.wait") == []
    assert found(tags={"error": "true"}) == [4]
    assert found(tags={"pdserve.outcome": "finished", "gen_ai.request.model": "m"}) == [3, 2, 1]
    assert found(tags={"pdserve.outcome": "finished", "error": "true"}) == []
    assert found(tags={"event": "first_token"}) == [3, 2, 1]
    assert found(tags={"service.instance.id": "pdserve-kvd-1"}) == [3, 2, 1]
    assert found(operation="pdserve.request", max_ns=10 * made.MS) == [4]
    assert found(operation="pdserve.request", min_ns=10 * made.MS) == [3, 2, 1]
    begin, end = made.START + 2 * second, made.START + 3 * second - 1
    assert [row[-2:] for row in reader.find(Search(begin, end))] == ["02"]


def test_requests_are_filtered(file: File) -> None:
    """By mode, outcome, model, and by what somebody calls one: its id, or how its trace's begins."""
    file.writer().add(spans(made.request(1), made.request(2, "write", made.START + 1), made.failed(3)), NOW)
    reader = file.reader()
    assert [row.request_id for row in reader.requests(10, mode="write")] == ["cmpl-2"]
    assert [row.request_id for row in reader.requests(10, outcome="failed")] == ["cmpl-3"]
    assert reader.requests(10, model="other") == []
    assert len(reader.requests(10, model="m")) == 3
    assert [row.request_id for row in reader.requests(10, called="cmpl-1")] == ["cmpl-1"]
    assert [row.request_id for row in reader.requests(10, called=made.Made(2).hex)] == ["cmpl-2"]
    assert reader.requests(10, called="cmpl") == []
    assert reader.requests(10, called="abc") == [], "fewer than eight digits"
    assert len(reader.requests(10, called=made.Made(1).hex[:8])) == 3
    assert [timing.ttft for timing in reader.timings(0, "write")] == [made.total(made.WRITE) / 1e9]
    assert len(reader.timings(0)) == 2


def test_who_calls_whom(file: File) -> None:
    """Dependencies count spans whose parent is another service's."""
    file.writer().add(spans(made.request(1), made.request(2)), NOW)
    assert file.reader().dependencies(*ALWAYS) == [
        (made.DECODE, made.KVD, 4),
        (made.PROXY, made.DECODE, 12),
        (made.PROXY, made.PREFILL, 4),
    ]


def test_the_oldest_give_way_when_it_is_full(file: File) -> None:
    """However much comes, the file and its log stay below the bound; what is left is the newest, whole."""
    file.max_bytes = 4 << 20
    writer = file.writer()
    size = len(spans(made.request(0)))
    largest = 0
    for step in range(60):
        writer.add(spans(*(made.request(step * 20 + n) for n in range(20))), NOW)
        largest = max(largest, file.size)
    assert largest <= file.max_bytes
    reader = file.reader()
    kept = sorted(int(trace_id[-4:], 16) for trace_id in reader.find(search(limit=2000)))
    assert 100 < len(kept) < 1100, "the bound was reached, and not by throwing nearly all away"
    assert kept == list(range(1200 - len(kept), 1200))
    assert {len(trace) for trace in reader.traces([made.Made(kept[0]).hex, made.Made(1199).hex])} == {size}
    assert len(reader.requests(10_000)) == len(kept)


def test_a_reader_that_does_not_end_cannot_fill_the_disk(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it looks at one state the log cannot be folded in: when that is full, batches fail instead, and the bound
    holds; once the reader has ended they are stored again."""
    monkeypatch.setattr(schema, "BUSY_S", 0.05)
    file.max_bytes = 4 << 20
    writer, reader = file.writer(), file.reader()
    reader.begin()
    reader.services()  # from here on it holds what there is
    batches = (spans(*(made.request(step * 20 + n) for n in range(20))) for step in range(60))
    with pytest.raises(sqlite3.OperationalError, match="a reader holds it"):
        collections.deque((writer.add(batch, NOW) for batch in batches), maxlen=0)
    assert file.size <= file.max_bytes
    assert reader.services() == []
    reader.end()
    assert not writer.add(next(batches), NOW)
    assert reader.services() != []


@pytest.mark.parametrize("size", [30, 60_000])
def test_the_bound_holds_for_spans_of_any_size(file: File, size: int) -> None:
    """Many tiny ones, which cost more in the index than in themselves, and few huge ones, in the largest exports that
    the receiver takes."""
    file.max_bytes = 4 << 20
    writer, number, largest = file.writer(), 0, 0
    for _ in range(60):
        trace, sent = made.Made(number := number + 1), 0
        while sent + size < file.max_bytes // 32:
            one = trace.span("x", made.KVD, 1, 2)
            if size > 100:
                one.attributes.extend(made.pairs({"text": "x" * size}))
            sent += one.ByteSize()
        assert not writer.add(spans(trace), NOW)
        largest = max(largest, file.size)
    assert file.max_bytes // 2 < largest <= file.max_bytes


def test_the_old_are_taken_out(file: File) -> None:
    """By the time of arrival, which no exporter's clock decides; what nobody needs any more goes with them."""
    file.max_age = 100.0
    writer = file.writer()
    writer.add(spans(made.failed(1)), NOW)
    writer.add(spans(made.request(2)), NOW + 60 * 10**9)
    writer.prune(NOW + 99 * 10**9)
    reader = file.reader()
    assert len(reader.find(search())) == 2
    writer.prune(NOW + 120 * 10**9)
    assert reader.find(search()) == [made.Made(2).hex]
    writer.prune(NOW + 300 * 10**9)
    assert (reader.find(search()), reader.requests(9), reader.services()) == ([], [], [])


def test_a_trace_without_end_is_refused(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader takes a trace as a whole: more spans than the bound are not taken, and counted."""
    monkeypatch.setattr(writing, "MAX_TRACE_SPANS", 10)
    given = spans(made.request(1))
    writer = file.writer()
    assert writer.add(given[:6], NOW).total() == 0
    refused = writer.add(given[6:], NOW)
    assert refused.total() == len(given) - 10
    assert "more than 10 spans" in otlp.why(refused)
    assert len(file.reader().traces([made.Made(1).hex])[0]) == 10


def test_a_batch_that_fails_leaves_nothing(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing: an error in the middle undoes what came before it, and the next batch is stored in full."""
    writer = file.writer()
    given = spans(made.request(1))
    good, bad = rows.span_content, iter([True, False])

    def broken(span: Span) -> str:
        if not next(bad):
            raise sqlite3.OperationalError("disk I/O error")
        return good(span)

    monkeypatch.setattr(writing, "span_content", broken)
    with pytest.raises(sqlite3.OperationalError):
        writer.add(given, NOW)
    monkeypatch.setattr(writing, "span_content", good)
    reader = file.reader()
    assert (reader.find(search()), reader.services()) == ([], [])
    writer.add(given, NOW)
    assert {span.span_id: span for span in reader.traces([made.Made(1).hex])[0]} == {s.span_id: s for s in given}


def test_the_file_is_its_owners(file: File) -> None:
    """Nobody else may read what was asked of the models."""
    file.writer()
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("hello, I am a letter"), "is not a trace store: it is no SQLite file"),
        (lambda path: _other(path, 0, 0), "another program's database"),
        (lambda path: _other(path, schema.APPLICATION, 99), "has version 99, this pdserve-traces reads 2"),
        (lambda path: _broken(path), "is damaged"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
)
def test_another_file_is_refused_with_a_sentence(tmp_path: Path, make: object, says: str) -> None:
    """A foreign, a newer and a damaged file are left as they are."""
    path = tmp_path / "x"
    make(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ConfigError, match=says):
        Writer(path, 4 << 20, 1.0)
    assert (path.read_bytes() if path.is_file() else b"") == before


def _other(path: Path, application: int, version: int) -> None:
    database = sqlite3.connect(path)
    database.executescript(
        f"CREATE TABLE letters (x); PRAGMA application_id = {application}; PRAGMA user_version = {version}"
    )
    database.close()


def _broken(path: Path) -> None:
    writer = Writer(path, 64 << 20, 1e6)
    writer.add(spans(*(made.request(n) for n in range(50))), NOW)
    writer.close()
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 20)


async def test_two_processes_do_not_share_a_file(tmp_path: Path, clock: StoppedClock) -> None:
    """The second is told who is in the way; once the first has ended it may."""
    first = Store(tmp_path / "t", 4 << 20, 1.0, clock)
    with pytest.raises(ConfigError, match="another pdserve-traces has"):
        Store(tmp_path / "t", 4 << 20, 1.0, clock)
    await first.aclose()
    await first.aclose()
    await Store(tmp_path / "t", 4 << 20, 1.0, clock).aclose()


def test_a_question_that_takes_too_long_is_ended(file: File) -> None:
    """The clock interrupts SQLite, and the error says that it was the deadline."""
    file.writer()
    reader = Reader(file.path, 0.05)
    reader.begin()
    forever = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(sqlite3.OperationalError) as caught:
        reader._ask(forever).fetchone()
    assert isinstance(explain(caught.value, 0.05), DeadlinePassed)
    reader.end()
    reader.begin()
    assert reader.services() == []
    reader.close()
