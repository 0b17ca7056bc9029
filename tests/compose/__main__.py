"""`python -m tests.compose`: brings an engine and all that the tests need, runs them, and leaves no container behind.

An engine that the docker command reaches is used where PDSERVE_COMPOSE_ENGINE=here; else one of our own is started,
which takes root and dockerd. Ends with `compose: N checks, N passed`. `python -m tests.compose vllm` runs vLLM on CPU
instead, by hand: its image takes minutes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

from tests.compose import engine, prepare
from tests.compose.engine import CannotStart
from tests.compose.prepare import CACHE, CannotPrepare

NOT_RUN = 3
"""Exit status where no engine can be started: nothing has been tested."""
_TESTS_S, _VLLM_S = 1200.0, 3600.0
VLLM = "tests/compose/vllm_on_cpu.py"
"""Not collected with the others."""
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile")
"""They wait for most of their time, and a file's tests are the life of one deployment."""


def main(argv: list[str]) -> int:
    """Exit status: pytest's, or NOT_RUN."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the engine is stopped then too

    by_hand = argv[:1] == ["vllm"]
    tests, argv = (VLLM, argv[1:]) if by_hand else ("tests/compose", argv)

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:3.0f} s] {what}", flush=True)

    with contextlib.ExitStack() as stack:
        try:
            if os.environ.get("PDSERVE_COMPOSE_ENGINE") == "here":
                found = engine.existing()
                if found is None:
                    raise CannotStart("PDSERVE_COMPOSE_ENGINE=here, and the docker command reaches no engine")
                base = os.environ.get("PDSERVE_BASE", "python:3.11-slim-bookworm")
            else:
                found = stack.enter_context(engine.private(CACHE / "engine"))
                base = ""
        except CannotStart as error:
            print(f"compose: NOT RUN, no container engine can be started here: {error}", flush=True)
            return NOT_RUN
        environ = {**os.environ, "DOCKER_HOST": found.host} if found.host else dict(os.environ)
        try:
            say("an engine answers; compose")
            binary = prepare.compose_binary()
            say("wheels")
            prepare.wheels()
            if by_hand:
                prepare.wheels_vllm()
            if not base:
                base = prepare.BASE
                if subprocess.run(
                    ["docker", "image", "inspect", base], env=environ, capture_output=True, timeout=60, check=False
                ).returncode:
                    say("a base image, offline")
                    archive = prepare.base_archive()
                    prepare.run("docker", "--host", found.host, "import", archive, base)
        except CannotPrepare as error:
            print(f"compose: {error}", file=sys.stderr)
            return 1
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-run-"))
        environ |= {"PDSERVE_BASE": base, "PDSERVE_COMPOSE": str(binary), "PDSERVE_COMPOSE_RUN": folder}
        say("tests")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command = [*found.enter, *pytest, *(() if by_hand else SIDE_BY_SIDE), tests, *argv]
        most = _VLLM_S if by_hand else _TESTS_S
        status = subprocess.run(command, env=environ, cwd=prepare.ROOT, timeout=most, check=False).returncode
        if found.enter:  # a week's builds stay, for the next one's sake
            prune = ["docker", "image", "prune", "--force", "--filter", "until=168h"]
            subprocess.run(prune, env=environ, capture_output=True, timeout=120, check=False)
        say("the end")
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
