"""`pdserve bench` beside `vllm bench serve`: the same load on the same deployment, the same medians.

Real: every process, both clients. Simulated: the model, whose steps take a fixed time whatever the prompt, because
the two clients' prompts are alike in number and times but not in content.

The clients take turns: what disturbs the machine for some seconds is in one round of one client, and outvoted.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.results import Run, load
from pdserve.cli import model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ROUNDS = 3
RATE, REQUESTS, OUTPUT = 4.0, 12, 24
"""Of a round: requests a second, requests, and tokens of each answer."""
ROUND_S = 120.0
"""Longest wait for a round of theirs, the first of which waits for the import of vLLM."""
STEPS = ("--sim-cost-prefill-base", "0.05", "--sim-cost-decode-base", "0.03")
PDSERVE = (sys.executable, "-m", "pdserve.cli")
SERVE = """
import json, pathlib, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    done, *words = json.loads(line)
    main(parser.parse_args(words))
    pathlib.Path(done).touch()
"""
"""`vllm bench serve` without the rest of vLLM's command line, which asks for a package of that very name; one run for
each line, so that vLLM is imported once."""
Theirs = Callable[[str, int], dict[str, Any]]


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Theirs]:
    """`theirs(url, seed)`: what `vllm bench serve` writes of a round."""
    log = tmp_path / "vllm.log"
    tokenizer, _ = model.resolve("smollm2-135m")
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=out, stderr=out)
    assert process.stdin is not None

    def one(url: str, seed: int) -> dict[str, Any]:
        result, done = tmp_path / f"vllm-{seed}.json", tmp_path / f"vllm-{seed}.done"
        words = {
            "--backend": "openai", "--base-url": url, "--model": "sim", "--tokenizer": tokenizer,
            "--dataset-name": "random", "--input-len": "40", "--output-len": str(OUTPUT),
            "--num-prompts": str(REQUESTS), "--request-rate": f"{RATE:g}", "--seed": str(seed), "--temperature": "0",
            "--result-dir": str(tmp_path), "--result-filename": result.name,
        }  # fmt: skip
        flat = [word for pair in words.items() for word in pair]
        assert process.stdin is not None
        process.stdin.write(json.dumps([str(done), *flat, "--save-result", "--save-detailed"]).encode() + b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + ROUND_S
        while not done.exists():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
        told: dict[str, Any] = json.loads(result.read_text())
        return told

    try:
        yield one
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()


@pytest.fixture
def url() -> Iterator[str]:
    """A sim deployment's HTTP address."""
    from pdserve.cli import deployment
    from pdserve.client import ConfigError

    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        words = ("up", "--engine", "sim", "--grpc-port", "0", "--http-port", "0", "--no-traces", "--state-dir", folder)
        with (Path(folder) / "out").open("wb") as out:
            process = subprocess.Popen([*PDSERVE, *words, "--", *STEPS], stdout=out, stderr=out, start_new_session=True)
        try:
            while True:
                try:
                    at = deployment.find(Path(folder))
                    break
                except ConfigError:
                    assert process.poll() is None, (Path(folder) / "out").read_text()
                    with pytest.raises(subprocess.TimeoutExpired):
                        process.wait(0.2)
            yield at.http.removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(60)


def ours(url: str, seed: int, out: Path) -> Run:
    """What `pdserve bench` writes of a round."""
    # 200 tokens: as many as their 40 tokens have bytes, of which the simulated model makes tokens.
    words = ["--url", url, "--input-len", "200", "--output-len", str(OUTPUT), "--rate", f"{RATE:g}"]
    command = [*PDSERVE, "bench", *words, "--seed", str(seed), "--requests", str(REQUESTS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (run,) = load(out).runs
    return run


def test_medians_are_those_of_vllm_bench_serve(theirs: Theirs, url: str, tmp_path: Path) -> None:
    """TTFT and ITL at the median differ by at most 5 % or 2 ms, in the middle one of three rounds; in each round both
    send at the same times and get all tokens."""
    medians: dict[str, list[tuple[float, float]]] = {"ttft": [], "itl": []}
    for seed in range(ROUNDS):
        other = theirs(url, seed)
        run = ours(url, seed, tmp_path / f"ours-{seed}.json")
        mine = run.summary
        assert other["completed"] == mine.completed == REQUESTS
        tokens = sum(record.output_tokens for record in run.requests)
        assert other["total_output_tokens"] == tokens == REQUESTS * OUTPUT
        assert [len(itls) for itls in other["itls"]] == [len(record.itls) for record in run.requests]
        assert mine.ttft is not None
        assert mine.itl is not None
        medians["ttft"].append((mine.ttft.p50, other["median_ttft_ms"] / 1e3))
        medians["itl"].append((mine.itl.p50, other["median_itl_ms"] / 1e3))
    for name, rounds in medians.items():
        for here, there in rounds:
            print(f"{name}: {here * 1e3:.2f} ms here, {there * 1e3:.2f} ms in `vllm bench serve`")
        off = statistics.median(here - there for here, there in rounds)
        assert abs(off) <= max(0.05 * statistics.median(there for _, there in rounds), 0.002), name
