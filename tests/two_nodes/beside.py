"""A second prefill engine beside the first, of the same kvd and proxy. Its KV lies otherwise: two ranks, each with one
KV head, and blocks half as large."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from tests.two_nodes.conftest import FRONT, PING, A, said, start

HALF = 32
"""Tokens of a block."""
ARGS = ("--tensor-parallel-size", "2", "--block-size", str(HALF), "--kv-cache-memory-bytes", str(4 << 20))
"""For vLLM. 4 MiB for each rank: as many tokens as the first engine has in 8."""


class Beside:
    """See the module; `process` is its service, which writes to `log`."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process = process
        self._log = log
        self._left = False

    @classmethod
    async def start(cls, folder: Path, key: Path, model: Path, args: tuple[str, ...]) -> "Beside":
        """Starts it beside the kvd of the first node, which may be starting too. `args`: what both engines have."""
        core = min(os.sched_getaffinity(0))  # the first node's
        log = folder / "beside.log"
        words = [str(Path(__file__).with_name("gentle.py")), "--model", str(model), "--served-model-name", model.name,
                 "--cpus", f"{core},{core}", "--kvd-socket", f"{folder}/{A}/kvd.sock", "--kvd-seconds", "100",
                 "--host", FRONT[A], "--proxy", f"{FRONT[A]}:{PING}", "--cluster-key-file", str(key),
                 "--log-format", "console", "--", *ARGS, *args]  # fmt: skip
        return cls(await start(A, words, log, core=core), log)

    async def registered(self, within: float) -> None:
        """Waits until the proxy knows it; AssertionError: not in time."""
        await said(self._log, "] registered", self.process, within)

    def leave(self) -> None:
        """Lets it drain, and end; safe twice."""
        if not self._left:  # a second signal would end it at once
            self._left = True
            self.process.send_signal(signal.SIGTERM)

    async def end(self, within: float) -> None:
        """It leaves, and ends with status 0, else AssertionError; safe twice."""
        self.leave()
        assert await asyncio.wait_for(self.process.wait(), within) == 0, self._log.read_text()
