"""`pdserve demo` does not say that all is well when it is not: its real processes, one of which is made to lie."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NOTHING_MOVES = """
import sys

if "pdserve.kvd" in sys.orig_argv:
    from pdserve.kvd.transport.arena import Arena

    Arena.move = lambda self, dst, src, length, cancelled: int(length.sum())
"""
THE_SINGLE_ENGINE_SAYS_SOMETHING_ELSE = """
import sys

if "both" in sys.orig_argv:
    from pdserve.engine.sim import content

    honest = content.next_token
    content.next_token = lambda raw, seed: honest(raw, seed + 1)
"""


def demo(folder: Path, lie: str) -> "subprocess.CompletedProcess[str]":
    """The demo with the sim engine; Python runs `lie` at the start of each of its processes."""
    (folder / "sitecustomize.py").write_text(lie)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    said = subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "demo", "--engine", "sim"],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(folder)},  # where its traces stay
    )
    kept = re.search(r"^logs are kept in (/tmp/pdserve-demo-\w+)/logs$", said.stdout, re.MULTILINE)
    assert kept, "a demo that fails leaves its logs to be read"
    shutil.rmtree(kept[1])
    return said


def test_answers_that_differ(tmp_path: Path) -> None:
    """The closing line counts none as identical, each answer is named as wrong, and the exit status is 1."""
    said = demo(tmp_path, THE_SINGLE_ENGINE_SAYS_SOMETHING_ELSE)
    assert said.returncode == 1, said.stdout + said.stderr
    lines = said.stdout.splitlines()
    assert "demo: 6 answers, 0 identical to the single engine" in lines
    assert len([line for line in lines if line.startswith("WRONG: ") and "the pair says" in line]) == 6


def test_a_daemon_that_moves_nothing(tmp_path: Path) -> None:
    """It says that all bytes landed; the decode engine finds that they did not, and the exit status is 1."""
    said = demo(tmp_path, NOTHING_MOVES)
    assert said.returncode == 1, said.stdout + said.stderr
    assert "corrupt KV" in said.stderr
    assert "identical to the single engine" not in said.stdout
