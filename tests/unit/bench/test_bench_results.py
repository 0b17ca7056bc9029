"""The document that a measurement leaves."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdserve.bench import schema
from pdserve.bench.goodput import goodput_of
from pdserve.bench.results import (
    SCHEMA,
    EngineFacts,
    Failure,
    Machine,
    Record,
    Results,
    Run,
    Target,
    Tried,
    Workload,
    dump,
    load,
    parse,
    save,
)
from pdserve.bench.slo import Slo
from pdserve.bench.summary import spread, summarise
from pdserve.bench.table import save_csv, to_csv
from pdserve.bench.words import report
from pdserve.rpc.errors import ConfigError

GOOD = Record(
    0, 0.0, 0.001, 10, 4, 3, 0.2, (0.1, 0.3), 0.2, 0.6, "write", "shm", {"tokenize": 0.05, "kv.wait": 0.1}, 0.05
)
SLOW = Record(1, 0.5, 0.5, 10, 0, 3, 0.4, (0.1, 0.1), 0.1, 0.6, "write", "shm", {"tokenize": 0.03}, missed=("ttft",))
FAILED = Record(
    2, 1.0, 1.0, 10, 0, 0, None, (), None, None, missed=("error",), error=Failure("NO_ENGINES", "none, \"none\"")
)  # fmt: skip


def results(**more: Any) -> Results:
    """One run of three requests: one good, one slow, one failed."""
    records = (GOOD, SLOW, FAILED)
    run = Run(4.0, None, "2026-01-02T03:04:05Z", 2.0, summarise(records, 2.0, 4.0), records)
    usual: dict[str, Any] = {
        "schema": SCHEMA,
        "created": "2026-01-02T03:04:05Z",
        "label": 'a "label" {"index":',
        "target": Target("127.0.0.1:1", "grpc", "sim", "write", "shm", (EngineFacts("e1", "prefill"),)),
        "machine": Machine("cpu", 2, 8.0, "Linux"),
        "workload": Workload("2K/1K", {"kind": "fixed"}, {"kind": "like_vllm", "burstiness": 1.0}, 3, 0),
        "slo": Slo(ttft=0.3),
        "runs": (run,),
        "goodput": goodput_of([Tried(4.0, 1 / 3, 3)], 0.9, "why"),
    }
    return Results(**(usual | more))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Every member, through a file; no scratch file is left."""
    save(results(), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == results()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_document_keeps_to_its_schema() -> None:
    """And a document that lacks a member, or has one of another kind, does not."""
    check = jsonschema.Draft202012Validator(schema.schema())
    whole = json.loads(dump(results()))
    check.validate(whole)
    for spoil in ({"runs": None}, {"slo": {"ttft": "fast"}}, {"schema": "pdserve.bench/0"}):
        assert list(check.iter_errors(whole | spoil)), spoil
    del whole["target"]
    assert list(check.iter_errors(whole))


def test_the_schema_that_is_kept_is_that_of_the_classes() -> None:
    """python -m pdserve.bench.schema > clients/pdserve/bench/results.schema.json"""
    kept = Path(schema.__file__).with_name("results.schema.json").read_text()
    assert kept == schema.text()


def test_every_request_is_a_line() -> None:
    """Three records, and a label that looks like the beginning of one."""
    lines = dump(results()).decode().splitlines()
    assert len(lines) == 4
    assert sum(line.startswith('{"index":') for line in lines) == 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "its schema is None"),
        (b'{"schema": "pdserve.bench/9"}', "its schema is 'pdserve.bench/9', this version reads 'pdserve.bench/1'"),
        (b'{"schema": "pdserve.bench/1"}', "missing required field"),
        (dump(results()).replace(b'"seed":0', b'"seed":"0"'), "seed"),
        (dump(results()).replace(b'"ttft":0.3', b'"ttft":-1'), "SLO on TTFT is -1"),
    ],
)
def test_another_document_is_refused_in_words(tmp_path: Path, data: bytes, said: str) -> None:
    """With the file's name and what is wrong."""
    with pytest.raises(ConfigError, match=said):
        parse(data)
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"x\.json is no result"):
        load(tmp_path / "x.json")


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    """A folder that is not there."""
    for work in (lambda: load(tmp_path / "no" / "r"), lambda: save(results(), tmp_path / "no" / "r")):
        with pytest.raises(ConfigError, match="cannot"):
            work()
    with pytest.raises(ConfigError, match="cannot write"):
        save_csv(results(), tmp_path / "no" / "r")


def test_a_run_in_figures() -> None:
    """A third attains; durations are of what completed, gaps of all of it, parts over those that have any."""
    summary = results().runs[0].summary
    assert (summary.requests, summary.completed, summary.failed) == (3, 2, 1)
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.good_rate == pytest.approx(4 / 3)
    assert summary.request_throughput == 1.0
    assert summary.output_token_throughput == 3.0
    assert summary.total_token_throughput == 13.0
    assert summary.itl is not None
    assert summary.itl.mean == pytest.approx(0.15)
    assert summary.itl.p50 == pytest.approx(0.1)
    assert summary.ttft == spread([0.2, 0.4])
    assert list(summary.parts) == ["tokenize", "kv.wait"]
    assert summary.parts["kv.wait"].mean == pytest.approx(0.05)
    assert summary.missed == {"ttft": 1, "error": 1}


def test_a_run_of_failures_has_no_durations() -> None:
    """Null, not zero."""
    summary = summarise([FAILED], 1.0, 1.0)
    assert summary.ttft is summary.itl is summary.tpot is summary.e2e is None
    assert summary.attainment == 0.0
    assert summary.late is not None


def test_csv_has_a_line_a_request() -> None:
    """Figures of its ITL, its parts in columns, and nothing where there is no value."""
    rows = list(csv.DictReader(io.StringIO(to_csv(results()))))
    assert [row["index"] for row in rows] == ["0", "1", "2"]
    assert (rows[0]["itl_max"], rows[0]["part.kv.wait"], rows[0]["rate"]) == ("0.3", "0.1", "4.0")
    assert (rows[1]["missed"], rows[1]["part.kv.wait"]) == ("ttft", "")
    assert (rows[2]["ttft"], rows[2]["error"], rows[2]["missed"]) == ("", "NO_ENGINES", "error")


def test_the_table_names_what_it_prints() -> None:
    """Attainment, good rate, goodput, and what broke off."""
    text = report(results(partial=True, why_partial="ended by SIGINT"))
    assert "33.3%" in text
    assert "1.33/s" in text
    assert "1 of 3" in text
    assert "goodput at 90% attainment: below 4 req/s" in text
    downwards = goodput_of([Tried(8.0, 0.1, 50), Tried(2.0, 0.1, 50)], 0.9, "why")
    assert "goodput at 90% attainment: below 2 req/s" in report(results(goodput=downwards))
    assert "PARTIAL: ended by SIGINT" in text
    closed = Run(None, 16, "", 1.0, summarise([FAILED], 1.0, None), (FAILED,), partial=True)
    assert "16 in flight (partial)" in report(results(runs=(closed,), goodput=None))
