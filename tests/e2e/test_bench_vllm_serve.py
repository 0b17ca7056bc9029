"""`pdserve bench` beside `vllm bench serve`: the same load on the same deployment, the same medians.

Real: every process, both clients. Simulated: the model, whose steps take a fixed time whatever the prompt, because
the two clients' prompts are alike in number and times but not in content.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.results import load
from pdserve.cli import model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

RATE, REQUESTS, OUTPUT = 4.0, 40, 24
STEPS = ("--sim-cost-prefill-base", "0.05", "--sim-cost-decode-base", "0.03")
PDSERVE = (sys.executable, "-m", "pdserve.cli")
SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the rest of vLLM's command line, which asks for a package of that very name."""


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


def vllm_serve(url: str, folder: Path) -> dict[str, Any]:
    """What `vllm bench serve` writes."""
    tokenizer, _ = model.resolve("smollm2-135m")
    words = {
        "--backend": "openai", "--base-url": url, "--model": "sim", "--tokenizer": tokenizer,
        "--dataset-name": "random", "--input-len": "40", "--output-len": str(OUTPUT), "--num-prompts": str(REQUESTS),
        "--request-rate": f"{RATE:g}", "--seed": "0", "--temperature": "0", "--result-dir": str(folder),
        "--result-filename": "vllm.json",
    }  # fmt: skip
    flat = [word for pair in words.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *flat, "--save-result", "--save-detailed"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads((folder / "vllm.json").read_text())
    return told


def test_medians_are_those_of_vllm_bench_serve(url: str, tmp_path: Path) -> None:
    """TTFT and ITL at the median differ by at most 5 % or 2 ms; both send at the same times and get all tokens."""
    theirs = vllm_serve(url, tmp_path)
    out = tmp_path / "ours.json"
    # 200 tokens: as many as their 40 tokens have bytes, of which the simulated model makes tokens.
    words = ["--url", url, "--input-len", "200", "--output-len", str(OUTPUT), "--rate", f"{RATE:g}", "--seed", "0"]
    command = [*PDSERVE, "bench", *words, "--requests", str(REQUESTS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (run,) = load(out).runs
    ours = run.summary
    assert theirs["completed"] == ours.completed == REQUESTS
    assert theirs["total_output_tokens"] == sum(record.output_tokens for record in run.requests) == REQUESTS * OUTPUT
    assert [len(itls) for itls in theirs["itls"]] == [len(record.itls) for record in run.requests]
    assert ours.ttft is not None
    assert ours.itl is not None
    for name, mine in (("ttft", ours.ttft.p50), ("itl", ours.itl.p50)):
        other = theirs[f"median_{name}_ms"] / 1e3
        print(f"{name}: {mine * 1e3:.2f} ms here, {other * 1e3:.2f} ms in `vllm bench serve`")
        assert abs(mine - other) <= max(0.05 * other, 0.002), name
