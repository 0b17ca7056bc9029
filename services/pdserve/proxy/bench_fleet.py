"""The services as they are deployed, for the proxy's benchmarks: kvd, a prefill and a decode service on simulated
engines, and a proxy, a process each.

The simulated engine has real KV, which kvd hands over, and no model. Its steps take the time that is said here: some
milliseconds, so that there is something for the proxy to wait for, and no more, so that what the proxy adds is not lost
in it.
"""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from pdserve.proxy.bench_processes import free_port, process
from pdserve.proxy.bench_rig import Standing, routable

PREFILL_MS: Final = 5.0
"""Of a step that computes prompts, however many."""
DECODE_MS: Final = 2.0
"""Of a step that decodes, for however many."""
_HOST: Final = "127.0.0.1"
_QUIET: Final = "--log-level=error"


def cost_flags() -> list[str]:
    """The simulated engine's flags for the times above."""
    seconds = {
        "prefill-base": PREFILL_MS / 1e3,
        "prefill-per-token": 0.0,
        "decode-base": DECODE_MS / 1e3,
        "decode-per-seq": 0.0,
        "decode-per-context-token": 0.0,
        "mixed-base": 0.0,
        "mixed-per-token": 0.0,
    }
    return [f"--sim-cost-{name}={value}" for name, value in seconds.items()]


@contextlib.asynccontextmanager
async def fleet(environ: Mapping[str, str]) -> AsyncIterator[Standing]:
    """Starts all of them with these variables besides our own; kills them.

    Raises:
        TimeoutError: the proxy cannot use the engines.
    """
    grpc, http, ping, prefill, decode = (free_port() for _ in range(5))
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        state = Path(folder) / "kvd"
        socket = state / "kvd.sock"
        engine = ["--engine=sim", f"--kvd-socket={socket}", f"--proxy={_HOST}:{ping}", f"--host={_HOST}", _QUIET]
        # All prompts are one: with a prefix cache nothing would be handed over after the first.
        engine += ["--no-sim-prefix-cache", "--sim-num-blocks=4096", *cost_flags()]
        front = [f"--grpc-port={grpc}", f"--http-port={http}", f"--ping-port={ping}", _QUIET]
        async with (
            process("pdserve.kvd", f"--state-dir={state}", f"--socket={socket}", _QUIET, environ=environ),
            process("pdserve.prefill", f"--port={prefill}", *engine, environ=environ),
            process("pdserve.decode", f"--port={decode}", *engine, environ=environ),
            process("pdserve.proxy", *front, environ=environ) as pid,
        ):
            address = f"{_HOST}:{grpc}"
            yield Standing(address, f"{_HOST}:{http}", pid, await routable(address))
