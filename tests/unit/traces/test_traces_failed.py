"""What the store keeps of a request that failed before its first token, and a file of the version before."""

import sqlite3

import pytest

from pdserve.traces import otlp, requests, schema
from tests.unit.traces import made
from tests.unit.traces.conftest import File

NOW = made.START + 60 * 10**9


def test_a_failed_request_has_the_parts_until_then(file: File) -> None:
    """They sum to the time after which it failed, which is no TTFT, and count in no percentile."""
    assert not file.writer().add(otlp.decode(made.broken(1).export()).spans, NOW)
    reader = file.reader()
    (row,) = reader.requests_of(made.Made(1).hex)
    assert (row.ttft, row.failed_after, row.failed_in, row.unattributed) == (None, 0.041, "kv.wait", 0.001)
    assert row.failed_or_later == ("decode.queue",)
    assert list(row.parts) == ["tokenize", "admit", "prefill.forward", "kv.wait"]
    assert sum(row.parts.values()) + (row.unattributed or 0.0) == pytest.approx(row.failed_after)
    assert reader.timings(0) == []


def test_a_first_token_outweighs_a_failure() -> None:
    """A span that says both, which none of ours does, is read as one with a TTFT."""
    spans = otlp.decode(made.request(1).export()).spans
    root = next(span for span in spans if span.name == "pdserve.request")
    said = {"pdserve.failed_after": 9.0, "pdserve.failed_in": "kv.wait", "pdserve.failed_in.or_later": ["decode.queue"]}
    root.tags.update(said)
    row = requests.of(root)
    assert row is not None
    assert row.ttft is not None
    assert (row.failed_after, row.failed_in, row.failed_or_later) == (None, "", ())


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_the_version_before_goes_on(file: File, version: int) -> None:
    """What it has stays as it was; what comes is kept with all of it. A file of this version may lack a column too, of
    a build before the column."""
    writer = file.writer()
    assert not writer.add(otlp.decode(made.request(1).export()).spans, NOW)
    writer.close()
    database = sqlite3.connect(file.path)
    for column in ("failed_after", "failed_in", "failed_or_later")[2 * (version - 1) :]:
        database.execute(f"ALTER TABLE requests DROP COLUMN {column}")
    database.execute(f"PRAGMA user_version = {version}")
    database.commit()
    database.close()
    assert not file.writer().add(otlp.decode(made.broken(2, made.START + 1).export()).spans, NOW)
    after, before = file.reader().requests(10)
    assert (before.request_id, before.failed_after, before.failed_in) == ("cmpl-1", None, "")
    assert before.ttft is not None
    assert (after.failed_after, after.failed_in, after.failed_or_later) == (0.041, "kv.wait", ("decode.queue",))
    assert before.failed_or_later == ()
    of_file = sqlite3.connect(file.path)
    assert of_file.execute("PRAGMA user_version").fetchone()[0] == schema.VERSION
    of_file.close()
