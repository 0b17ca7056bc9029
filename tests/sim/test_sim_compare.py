"""`pdserve bench compare` as a user starts it, with simulated engines: a real comparison, only tiny.

Real: the command, every process that it starts, gRPC, arrivals, the KV hand-over. Simulated: the model, whose costs are
a fifth of the published ones.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from pdserve.bench import machine
from pdserve.bench.compare import command, folder
from pdserve.bench.compare.objectives import Sample, calibrated, slo_of
from pdserve.bench.results import load

COMPARE = (sys.executable, "-m", "pdserve.bench.compare")
TINY = (
    *("--engine", "sim", "--scale", "0.2", "--rates", "10", "--requests", "6", "--repeats", "1"),
    *("--input-len", "64", "--output-len", "6", "--batch", "2", "--calibration", "2", "--warmup", "1"),
    *("--timeout", "30", "--start-timeout", "60", "--no-progress"),
)
WAIT_S = 90.0
"""Longest wait for a comparison; the box may be busy."""


def _compare(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMPARE, *TINY, *words], capture_output=True, text=True, timeout=WAIT_S, check=False)


def _running(mark: str) -> list[tuple[int, str]]:
    """Processes that have `mark` on their command line: id and line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if mark in line and int(file.parent.name) != os.getpid():
            found.append((int(file.parent.name), line))
    return found


def _mine(mark: str) -> list[str]:
    """Their command lines."""
    return [line for _, line in _running(mark)]


def _calibrated(words: list[str], rest: list[str], path: Path) -> None:
    """Leaves a comparison that has its objectives already: what follows starts one deployment less."""
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    args = parser.parse_args(words)
    args.rest = rest
    with folder.opened(path, command.settings_of(args), machine.here()) as kept:
        found = calibrated([Sample(1.0, (0.1,))], 2)
        kept.keep(calibration=found, slo=slo_of(found))


@dataclass(frozen=True)
class Compared:
    """A comparison of (b) and (d) that has ended."""

    folder: Path
    told: str
    """What it printed."""

    @property
    def tables(self) -> str:
        """The end of it."""
        return self.told[self.told.index("Attainment:") :]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Measured once for this file."""
    path = tmp_path_factory.mktemp("compared")
    done = _compare("--configurations", "b", "d", "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return Compared(path, done.stdout)


def test_objectives_come_first_then_each_configuration_by_itself(compared: Compared) -> None:
    """The SLOs are 5 x and 1.7 x the medians of the calibration, known before any load, and the same for all."""
    told = compared.told
    assert told.index("SLO: TTFT") < told.index("[1/2] (b) two colocated engines") < told.index("[2/2] (d) WRITE 1P1D")
    kept = json.loads((compared.folder / "compare.json").read_text())
    samples = kept["calibration"]["samples"]
    assert len(samples) == 2
    assert kept["slo"]["ttft"] == pytest.approx(5 * median(one["ttft"] for one in samples))
    assert kept["slo"]["itl"] == pytest.approx(1.7 * median(gap for one in samples for gap in one["itls"]))
    assert [cell["configuration"] for cell in kept["cells"]] == ["b", "d"]
    found = [load(compared.folder / f"{key}-0.json") for key in ("b", "d")]
    assert all((one.slo.ttft, one.slo.itl) == (kept["slo"]["ttft"], kept["slo"]["itl"]) for one in found)


def test_both_get_the_same_requests_and_nothing_from_a_cache(compared: Compared) -> None:
    """Arrivals and lengths are equal, answers as long as asked, no prompt token is cached, WRITE is really WRITE."""
    pair, write = (load(compared.folder / f"{key}-0.json") for key in ("b", "d"))
    assert (write.target.mode, write.target.transport, pair.target.mode) == ("write", "shm", "")
    for one in (pair, write):
        requests = one.runs[0].requests
        assert [r.due for r in requests] == [r.due for r in write.runs[0].requests]
        assert {(r.prompt_tokens, r.output_tokens, r.cached_tokens) for r in requests} == {(64, 6, 0)}
        assert len(requests) == 6


def test_every_process_has_its_share_of_the_cores(compared: Compared) -> None:
    """Proxy, kvd, engines, the client itself, what keeps the deployment, and the rest of the machine."""
    kept = json.loads((compared.folder / "compare.json").read_text())
    names = [set(cell["cpu"][0]["cores"]) for cell in kept["cells"]]
    assert names[0] == {"kvd", "both-0", "both-1", "proxy", "up", "client", "others"}
    assert names[1] == {"kvd", "prefill-0", "decode-0", "proxy", "up", "client", "others"}
    for cell in kept["cells"]:
        used = cell["cpu"][0]["cores"]
        assert used["proxy"] > 0
        assert used["client"] > 0
        assert sum(used.values()) <= 1.1 * (os.cpu_count() or 1)


def test_it_ends_with_tables_and_a_report(compared: Compared) -> None:
    """The ratio is named, scaled time is said to be scaled, CSV and HTML are there. The page has the tables too, and
    how the objectives came about."""
    for said in ("WRITE / (b)", "attainment at 10/s", "Goodput at 90% attainment", "Cores used"):
        assert said in compared.tables, compared.told
    assert "1 s here stands for 5 s" in compared.told
    assert {
        one["over"] + one["under"] for one in json.loads((compared.folder / "compare.json").read_text())["ratios"]
    } == {"db"}
    assert (compared.folder / "d-0.csv").read_text().count("\n") == 7
    page = (compared.folder / "report.html").read_text()
    for said in ("WRITE / (b)", "Cores used", "SLO: TTFT", "<strong>D WRITE 1P1D</strong>"):
        assert said in page, said


def test_started_again_it_goes_on_and_refuses_another_transport(compared: Compared, tmp_path: Path) -> None:
    """What was whole is not measured again: no objectives, no (b), and the tables are the same. Of (c) not a run is
    measured over a transport that is not the expected one."""
    copy = tmp_path / "copy"
    shutil.copytree(compared.folder, copy)
    done = _compare("--configurations", "b", "c", "--out", str(copy), "--expect-transport", "rdma")
    assert done.returncode == 1
    assert "READ 1P1D: --expect-transport rdma, but the KV cache moved over shm" in done.stderr
    assert "[1/2] (b) two colocated engines, repeat 1: measured already" in done.stdout
    assert done.stdout.count("ready after") == 1
    assert Compared(copy, done.stdout.replace(str(copy), str(compared.folder))).tables == compared.tables
    assert sorted(file.name for file in copy.glob("?-0*.json")) == ["b-0.json", "d-0.json"]


def test_a_deployment_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    """Status 1, which configuration it was, the engine's own words, and where its logs are."""
    words, rest = ["--configurations", "a", "--out", str(tmp_path)], ["--sim-block-size", "0"]
    _calibrated([*TINY, *words], rest, tmp_path)
    done = _compare(*words, "--", *rest)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("pdserve: (a) one colocated engine, all cores: the deployment did not start")
    assert "block_size must be at least 1" in done.stderr
    assert list((tmp_path / "logs" / "a-0").glob("both-*.log"))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A comparison whose first deployment serves; its processes have a mark on their command lines."""
    mark = ["--sim-max-seqs", str(100_000 + os.getpid())]
    words = [*TINY, "--requests", "200", "--configurations", "a", "--out", str(tmp_path)]
    _calibrated(words, mark, tmp_path)
    process = subprocess.Popen(
        [*COMPARE, *words, "--", *mark], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    folders: set[str] = set()
    try:
        for line in process.stdout:
            if "ready after" in line:
                break
        running = _mine(mark[1])
        assert running, "nothing runs"
        folders = {found for line in running for found in re.findall(r"--state-dir (/tmp/pdsc-\S+)", line)}
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)
        for left in folders:  # a killed one cannot remove its own
            shutil.rmtree(left, ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(started: subprocess.Popen[str], number: signal.Signals) -> None:
    """Ctrl-C ends the deployment first, status 130; of a killed one the guard ends it."""
    mark = str(100_000 + os.getpid())
    started.send_signal(number)
    said, _ = started.communicate(timeout=WAIT_S)
    assert started.returncode == (-9 if number is signal.SIGKILL else 130), said
    deadline = time.monotonic() + WAIT_S
    while left := _mine(mark):
        assert number is signal.SIGKILL, left  # the others have waited for all
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_an_engine_that_dies_ends_the_comparison_with_its_name(tmp_path: Path) -> None:
    """Status 1, the configuration, what died; the runs that were whole, and what there is of the broken one, stay."""
    mark = str(200_000 + os.getpid())
    words = [*TINY, "--requests", "200", "--configurations", "a", "--out", str(tmp_path)]
    rest = ["--sim-max-seqs", mark]
    _calibrated(words, rest, tmp_path)
    process = subprocess.Popen(
        [*COMPARE, *words, "--", *rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("[1/1]"):
                break
        assert "ready after" in process.stdout.readline()
        victims = [pid for pid, line in _running(mark) if "--role both" in line]
        assert len(victims) == 1
        os.kill(victims[0], signal.SIGKILL)
        _, said = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, said
    assert "pdserve: (a) one colocated engine, all cores: the deployment ended by itself" in said
    assert "was ended by signal 9" in said
    assert json.loads((tmp_path / "compare.json").read_text())["cells"] == []
    assert not (tmp_path / "a-0.json").exists()
    assert not _mine(mark)


def test_settings_that_measure_nothing_start_nothing(tmp_path: Path) -> None:
    """A typed error in one sentence, at once."""
    done = _compare("--rates", "3", "2", "--out", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "pdserve: rates must ascend, each once (CONFIG)\n"
    assert not (tmp_path / "none").exists()
