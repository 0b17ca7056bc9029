"""The two command lines: what they print, and that what is wrong is said in one sentence."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.__main__ import main
from pdserve.planner.measuring import fits, making
from pdserve.planner.measuring.points import Measured, PrefillPoint
from pdserve.planner.measuring.table import table
from pdserve.planner.profile_file import dumps, load, parse

from .test_profile_fit import measured

SIZE = ["--input-len", "2000", "--output-len", "200"]
LOAD = ["--rate", "2", "--slo-ttft", "1", "--slo-itl", "0.06", "--requests", "20"]

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs `pdserve plan`; exit status, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["plan", "--profile", "mi300x", *words])
        return (status, *capsys.readouterr())

    return call


def test_plan_in_words_and_numbers(said: Said, tmp_path: Path) -> None:
    """Words, JSON, a page and a picture tell the same plan: the answer, an interval, what binds, what would change it,
    what it costs."""
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    words = [*SIZE, *LOAD, "--engines", "2", "--cost-per-engine-hour", "10"]
    status, out, _ = said(*words, "--report", str(page))
    assert status == 0
    for part in ("-> Split 1P:1D", "Goodput (90% attainment): 1P:1D", "Binds: ", "Would change", "Cost of a million"):
        assert part in out, part
    status, out, _ = said(*words, "--json", "--report", str(picture))
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    assert found["answer"]["split"] is True
    assert found["attainment"]["low"] <= found["attainment"]["mean"] <= found["attainment"]["high"]
    assert {switch["what"] for switch in found["switches"]} >= {"ITL SLO"}
    assert found["cost_per_million_tokens"]["good"] > 0
    assert found["binding"]["machine"]
    assert page.read_text().startswith("<!doctype html>")
    assert "Split 1P:1D" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


WRONG: list[tuple[list[str], str]] = [
    ([*SIZE, *LOAD], "say how many engines there are"),
    ([*LOAD, "--engines", "2"], "say what is asked"),
    ([*SIZE, "--engines", "2"], "say how much is asked"),
    ([*SIZE, "--engines", "2", "--rate", "0", "--slo-ttft", "1"], "a rate of 0 requests a second"),
    ([*SIZE, *LOAD, "--engines", "2", "--slo-itl", "-1"], "not a positive number of seconds"),
    ([*LOAD, "--engines", "2", "--scenario", "3K/1K"], "no scenario 3K/1K: there are 1K/1K"),
    ([*SIZE, *LOAD, "--engines", "2", "--report", "plan.pdf", "--quick"], "a .html or a .png"),
    ([*LOAD, "--engines", "2", "--watch", "ftp://x"], "--watch reads the workload"),
    (["--slo-ttft", "1", "--watch", "ftp://x"], "an address as http://HOST:PORT"),
    (["--slo-ttft", "1", "--watch", "http://127.0.0.1:1", "--once"], "does not give its metrics"),
    (["--slo-ttft", "1", "--engines", "2", "--trace", "no-such-file"], "cannot read no-such-file"),
    (["--slo-ttft", "1", "--watch", "http://x", "--output-len", "5"], "leave out --output-len"),
    (["--slo-ttft", "1", "--watch", "http://x", "--hit-rate", "0"], "leave out --hit-rate"),
    (["--slo-ttft", "1", "--watch", "http://x", "--burstiness", "1"], "leave out --burstiness"),
    (["--watch", "http://127.0.0.1:1"], "without an SLO every way is as good"),
    (["--trace", "t", "--burstiness", "0.5", "--engines", "2"], "leave out --burstiness"),
    ([*SIZE, "--engines", "2", "--concurrency", "4", "--burstiness", "0.5"], "--burstiness is of arrivals at a --rate"),
    ([*SIZE, *LOAD, "--engines", "2", "--once"], "--once and --window are of --watch"),
    ([*SIZE, *LOAD, "--engines", "2", "--report", "no-such-folder/plan.png"], "there is no folder no-such-folder"),
]


@pytest.mark.parametrize(("words", "why"), WRONG, ids=[why for _, why in WRONG])
def test_wrong_plan_is_refused(said: Said, words: list[str], why: str) -> None:
    """Exit status 1 and the reason on stderr."""
    status, _, err = said(*words)
    assert status == 1
    assert why in err
    assert err.count("\n") == 1


def test_profile_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A name that is not shipped, and a file that is not a profile, are refused by name."""
    assert main(["plan", "--profile", "nobody", *SIZE, *LOAD, "--engines", "2"]) == 1
    assert "profile nobody: neither shipped" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text("name = 1")
    assert main(["plan", "--profile", str(tmp_path / "bad.toml"), *SIZE, *LOAD, "--engines", "2"]) == 1
    assert "bad.toml" in capsys.readouterr().err


FACTS = making.Facts("mine", "", "2026-01-01 00:00 UTC", "some CPU, 2 cores", 1, None)


def test_measured_profile_is_read_back(tmp_path: Path) -> None:
    """What `pdserve profile` writes is what `pdserve plan` reads: costs, pools, hand-over, context, and when and on
    which kind of machine it was measured."""
    data = measured()
    made = making.profile(data, fits.fit(data), FACTS, [])
    (tmp_path / "mine.toml").write_text(dumps(made))
    read = load(tmp_path / "mine.toml")
    assert read == made
    assert read.decode is not None
    assert read.decode.spec.kv_tokens == 10_000
    assert read.handover.bytes_per_token == 1000
    assert read.max_model_len == 4096
    assert read.fit["machine"] == "some CPU, 2 cores"
    assert "misfit" not in read.fit


def test_misfit_is_marked() -> None:
    """A profile that was kept although it does not fit says so, in the file that the plan reads."""
    data = measured()
    made = making.profile(data, fits.fit(data), FACTS, ["prefill: far off"])
    assert parse(dumps(made)).fit["misfit"] == "prefill: far off"


def test_table_says_what_is_left_over() -> None:
    """Each fit has a line with its constants, its points and its errors; below it, the hand-over."""
    shown = table(fits.fit(measured(noise=0.0)))
    print(shown)
    assert "prefill  50 ms + 200 us/token" in shown
    assert "decode   20 ms + 400 us/sequence + 300 ns/token of context" in shown
    assert "mixed    10 ms + 250 us/token" in shown
    assert "hand-over over shm: 1000 bytes/token in 8 layers, bandwidth 0.1 GB/s" in shown


# -- pdserve profile ------------------------------------------------------------------------


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `pdserve profile` against measurements that are given in place of a deployment's; the exit status."""

    def call(data: Measured, *words: str) -> int:
        async def measure(*_: object) -> Measured:
            return data

        monkeypatch.setattr("pdserve.planner.profile_command._measure", measure)
        return main(["profile", "--target", "127.0.0.1:1", *words])

    return call


def crooked() -> Measured:
    """Prefill time that grows with the square of the tokens: no line."""
    points = [PrefillPoint(n, 1e-6 * n * n) for n in (32, 64, 128, 256, 512, 1024, 4096)]
    return dataclasses.replace(measured(), prefill=tuple(points))


def test_misfit_is_not_lost(profiled: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A measurement that does not fit is refused after its table was printed, and is written beside, marked; with
    --keep it is written where it was wanted."""
    path = tmp_path / "mine.toml"
    assert profiled(crooked(), "--out", str(path)) == 1
    out, err = capsys.readouterr()
    assert "prefill  " in out
    assert f"the profile, marked, is in {tmp_path / 'mine.misfit.toml'} (--keep writes it to {path})" in err
    assert not path.exists()
    assert load(tmp_path / "mine.misfit.toml").fit["misfit"]
    assert profiled(crooked(), "--out", str(path), "--keep") == 0
    assert load(path).fit["misfit"]


def test_broken_off_measurement_is_kept_and_marked(
    profiled: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured before a request failed is written beside, whatever --keep says, as what the plan refuses; the
    reason is said, with status 1. Where it is too little for a fit, that is said, and nothing is written."""
    path, beside = tmp_path / "mine.toml", tmp_path / "mine.partial.toml"
    data = dataclasses.replace(measured(), broke_off="the engine is gone (ENGINE_DIED)")
    assert profiled(data, "--out", str(path), "--keep") == 1
    out, err = capsys.readouterr()
    assert "prefill  " in out
    assert (
        f"broke off: the engine is gone (ENGINE_DIED); the profile of what was measured, marked, is in {beside}" in err
    )
    assert not path.exists()
    assert main(["plan", "--profile", str(beside), *SIZE, *LOAD, "--engines", "2"]) == 1
    assert "does not fit what was measured: the measurement broke off: the engine is gone" in capsys.readouterr().err
    beside.unlink()
    assert profiled(dataclasses.replace(data, decode=()), "--out", str(path)) == 1
    assert "(ENGINE_DIED); too little was measured to be kept: decode: 0 points" in capsys.readouterr().err
    assert not beside.exists()


def test_place_that_cannot_be_written_is_found_first(
    profiled: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there, and a folder in place of a file, are refused before anything is measured."""
    for place, why in ((tmp_path / "none" / "mine.toml", "there is no folder"), (tmp_path, "it is a folder")):
        data = measured()
        capsys.readouterr()
        assert profiled(data, "--out", str(place)) == 1
        out, err = capsys.readouterr()
        assert why in err
        assert "seed" not in err
        assert not out
