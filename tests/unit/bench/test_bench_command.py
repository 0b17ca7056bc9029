"""The flags of `pdserve bench`, what they ask for, and what is refused before anything is sent."""

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench import command, options, plan, progress
from pdserve.bench.goodput import Search
from pdserve.bench.plan import Load
from pdserve.bench.results import Failure, Record, load
from pdserve.bench.slo import Slo
from pdserve.cli.__main__ import main
from pdserve.client.testing import FakeProxy

LENGTHS = ("--input-len", "10", "--output-len", "1")


def parsed(*words: str) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    """Answers everything with one token, and says of no mode."""
    with FakeProxy() as fake:
        yield fake


def test_flags_become_a_workload() -> None:
    """A sweep over a range of lengths with half of it cached."""
    wanted = options.wanted(
        parsed(
            "--input-len", "100-200", "--output-len", "5", "--rate", "1", "2.5", "--hit-rate", "0.5", "--seed", "3",
            "--slo-ttft", "1", "--slo-itl", "0.05", "--slo-itl-of", "max", "--arrivals", "gamma", "--burstiness", "0.5",
            "--content-seed", "4", "--requests", "10",
        )
    )  # fmt: skip
    made = plan.make(wanted)
    assert [load.rate for load in made.loads] == [1.0, 2.5]
    assert wanted.slo == Slo(1.0, 0.05, "max")
    assert made.workload.lengths == {
        "kind": "uniform", "prompt": "100-200", "output": "5", "token_ids": [100, 255], "content_seed": 4,
        "hit_rate": 0.5, "groups": 1, "block": 16,
    }  # fmt: skip
    assert made.workload.arrivals == {"kind": "gamma", "burstiness": 0.5}
    slow, fast = made.due(1.0), made.due(2.5)
    assert slow == pytest.approx([2.5 * time for time in fast])


def test_a_scenario_and_a_search() -> None:
    """2K/1K is of 2000 and 1000; the default arrivals are vLLM's, which end at count / rate."""
    wanted = options.wanted(
        parsed("--scenario", "2K/1K", "--goodput", "0.95", "--min-rate", "1", "--max-rate", "9", "--slo-ttft", "1")
    )
    made = plan.make(wanted)
    assert wanted.search == Search(1.0, 9.0, 0.95, 0.05)
    assert {(ask.prompt_tokens, ask.output_tokens) for ask in made.asks} == {(2000, 1000)}
    assert made.due(4.0)[-1] == pytest.approx(25.0)
    assert made.workload.arrivals == {"kind": "like_vllm", "burstiness": 1.0}


def test_content_differs_from_one_measurement_to_the_next() -> None:
    """Where no seed is given: else the second would find every prompt in the prefix cache."""
    first, second = (options.wanted(parsed(*LENGTHS, "--rate", "1")).content_seed for _ in range(2))
    assert first != second


def test_a_trace_is_replayed_as_it_is_or_at_another_rate(tmp_path: Path) -> None:
    """Its own rate is its gaps over its span."""
    file = tmp_path / "t.jsonl"
    lines = [{"time": time, "prompt_tokens": 5, "output_tokens": 2} for time in (3, 4, 7)]
    file.write_text("\n".join(map(json.dumps, lines)))
    own = plan.make(options.wanted(parsed("--trace", str(file))))
    assert own.loads == [Load(rate=0.5)]
    assert own.due(0.5) == [0.0, 1.0, 4.0]
    assert own.workload.arrivals == {"kind": "replay", "scaled": False}
    faster = plan.make(options.wanted(parsed("--trace", str(file), "--rate", "1")))
    assert faster.due(1.0) == [0.0, 0.5, 2.0]
    assert len(plan.make(options.wanted(parsed("--trace", str(file), "--requests", "2"))).asks) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "1"], "nothing says how long"),
        ([*LENGTHS, "--scenario", "1K/1K", "--rate", "1"], "a scenario and lengths say how long"),
        (["--input-len", "5", "--rate", "1"], "lengths by hand are two"),
        ([*LENGTHS], "how much load"),
        ([*LENGTHS, "--rate", "1", "--concurrency", "2"], "three different measurements"),
        ([*LENGTHS, "--rate", "0"], "a rate of 0"),
        ([*LENGTHS, "--rate", "nan"], "a rate of nan"),
        ([*LENGTHS, "--concurrency", "0"], "0 requests in flight"),
        ([*LENGTHS, "--rate", "1", "--requests", "0"], "0 requests"),
        ([*LENGTHS, "--rate", "1", "--slo-ttft", "0"], "SLO on TTFT is 0"),
        ([*LENGTHS, "--rate", "1", "--slo-itl", "-1"], "SLO on ITL is -1"),
        ([*LENGTHS, "--goodput"], "give both"),
        ([*LENGTHS, "--goodput", "--min-rate", "1", "--max-rate", "2"], "a goodput is of objectives"),
        ([*LENGTHS, "--goodput", "2", "--min-rate", "1", "--max-rate", "2"], "threshold of 2"),
        ([*LENGTHS, "--rate", "1", "--threshold", "0"], "threshold of 0"),
        ([*LENGTHS, "--rate", "1", "--arrivals", "poisson", "--burstiness", "2"], "Poisson arrivals have no"),
        ([*LENGTHS, "--rate", "1", "--burstiness", "0"], "burstiness of 0"),
        ([*LENGTHS, "--rate", "1", "--token-ids", "5", "5"], "token ids from 5 to 5"),
        ([*LENGTHS, "--rate", "1", "--timeout", "0"], "--timeout 0"),
        ([*LENGTHS, "--rate", "1", "--seed", "-1"], "--seed -1"),
        ([*LENGTHS, "--rate", "1", "--content-seed", "-1"], "--content-seed -1"),
        ([*LENGTHS, "--goodput", "--threshold", "0.8", "--min-rate", "1", "--max-rate", "2"], "say --goodput 0.8"),
        ([*LENGTHS, "--rate", "1", "--out", "/nowhere/r.json"], "cannot write /nowhere/r.json"),
        ([*LENGTHS, "--rate", "1", "--csv", "/"], "cannot write /: it is a folder"),
        ([*LENGTHS, "--rate", "1", "--report", "/nowhere/r.html"], "cannot write /nowhere/r.html"),
        ([*LENGTHS, "--rate", "1", "--png", "/dev/null/x"], "cannot write into /dev/null/x"),
        ([*LENGTHS, "--rate", "1", "--allow-transport", "shm"], "the fallbacks are memmove, python"),
        (["--trace", "/nowhere/t.jsonl"], "cannot read"),
        (["--dataset", "/nowhere/t.jsonl", "--rate", "1"], "cannot read"),
        ([*LENGTHS, "--rate", "1", "--tokenizer", "/nowhere/tokenizer.json"], "is no tokenizer.json"),
        (["report", "/nowhere/r.json"], "cannot read"),
    ],
)
def test_what_makes_no_measurement_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], proxy: FakeProxy, words: list[str], said: str
) -> None:
    """Status 1, a sentence on stderr, and nothing was sent."""
    assert main(["bench", *(() if words[0] == "report" else ("--target", proxy.target)), *words]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("pdserve: ")
    assert told.count("\n") == 1
    assert proxy.requests == []


def test_a_measurement_from_the_command_line(
    proxy: FakeProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A probe and twice five requests; the figures on stdout, the files as asked for, status 0."""
    out, table = tmp_path / "r.json", tmp_path / "r.csv"
    words = ("--rate", "200", "400", "--requests", "5", "--slo-ttft", "30", "--label", "x")
    status = main(["bench", "--target", proxy.target, *LENGTHS, *words, "--out", str(out), "--csv", str(table)])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert len(proxy.requests) == 11
    results = load(out)
    assert [run.summary.attainment for run in results.runs] == [1.0, 1.0]
    assert (results.label, results.target.api, results.partial) == ("x", "grpc", False)
    assert len(table.read_text().splitlines()) == 11
    assert "goodput at 90% attainment: 400 req/s" in told.out
    assert "answers without a hand-over" in told.err


def test_a_partial_measurement_has_status_1(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer after the probe's is an error: said, and not hidden in a figure."""
    from pdserve.rpc.errors import EngineDied

    proxy.answer("ok")
    for _ in range(9):
        proxy.refuse(EngineDied("gone"))
    words = ("--rate", "200", "--requests", "5", "--give-up", "3")
    assert main(["bench", "--target", proxy.target, *LENGTHS, *words]) == 1
    assert "PARTIAL: 3 requests in a row failed, the last with ENGINE_DIED: gone" in capsys.readouterr().out


def test_a_line_now_and_then_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """At most every ten seconds, and one at the end of a run."""
    now = [0.0]
    lines = progress.Lines(lambda: now[0])
    lines.begin(Load(rate=2.0), 3)
    for second in (1.0, 11.0, 12.0):
        now[0] = second
        lines.sent()
        lines.ended(Record(0, 0.0, 0.0, 1, 0, 1, 0.25, (), None, 0.25))
    said = capsys.readouterr().err.splitlines()
    assert said == ["2 req/s: 2 of 3 done; 2 sent, 0 in flight, 0 failed, 100% good, TTFT p50 250 ms"]


def test_a_failed_requests_first_token_is_in_no_median() -> None:
    """The counts say what the summary will: durations are of requests that completed."""
    counts = progress.Counts(Load(rate=2.0), 2)
    counts.ended(Record(0, 0.0, 0.0, 1, 0, 1, 9.0, (), None, None, missed=("error",), error=Failure("X", "x")))
    assert "TTFT" not in str(counts)
    counts.ended(Record(1, 0.0, 0.0, 1, 0, 1, 0.25, (), None, 0.25))
    assert str(counts).endswith("1 failed, 50% good, TTFT p50 250 ms")


def test_what_is_refused_leaves_no_session_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that cannot be is found before a connection is made that nobody would close."""
    from pdserve.bench.over_http import HttpEndpoint

    opened: list[str] = []

    async def open_(url: str, *_: object) -> None:
        opened.append(url)

    monkeypatch.setattr(HttpEndpoint, "open", open_)
    words = ("--url", "http://127.0.0.1:1", "--rate", "1", "--allow-transport", "shm")
    assert main(["bench", *LENGTHS, *words]) == 1
    assert "the fallbacks are memmove, python" in capsys.readouterr().err
    assert opened == []


async def test_the_live_display_shows_the_same_counts(tmp_path: Path) -> None:
    """Drawn by rich into a file here; a label with brackets is text."""
    file = tmp_path / "screen"
    with file.open("w") as out, progress.live(out) as view:
        view.begin(Load(concurrency=4), 2)
        view.sent()
        view.sent()
        error = Failure("NO_ENGINES", "none")
        view.ended(Record(0, 0.0, 0.0, 1, 0, 1, None, (), None, None, missed=("error",), error=error))
        view.say("[bold] stays")
        view.draw()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\s+", " ", file.read_text())
    assert "[bold] stays" in shown
    assert "4 in flight" in shown
    assert "1/2" in shown


def test_help_needs_no_grpc() -> None:
    """The flags alone load neither grpc nor numpy, so that --help answers at once."""
    import subprocess
    import sys

    code = (
        "import sys, argparse; from pdserve.bench import command; command.arguments(argparse.ArgumentParser());"
        "print([name for name in ('grpc', 'numpy', 'aiohttp', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_a_light_installation_says_what_is_missing() -> None:
    """Without the extra: one sentence and status 1, no traceback."""
    import subprocess
    import sys

    code = "import sys; sys.modules['msgspec'] = None; from pdserve.cli.__main__ import main; main(['bench'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stderr == "pdserve: `pdserve bench` needs msgspec: install pdserve with the extra `bench` (CONFIG)\n"


def test_infinity_is_no_rate() -> None:
    """All at once is a closed loop with as many places as requests."""
    with pytest.raises(Exception, match="rate of inf"):
        plan.make(plan.Wanted(scenario="1K/1K", rates=(math.inf,)))
