"""Deployments whose processes are fakes, run by path, that listen where the real ones would."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.cli import deployment
from pdserve.cli.plan import Plan, Process, Spec, engine_names, make_plan

FAKE = Path(__file__).with_name("fake_process.py")
WAIT = 30.0
"""Seconds that anything may take on a busy machine."""


def fake_plan(folder: Path, *, traces: bool = False, **extra: tuple[str, ...]) -> Plan:
    """A plan whose processes are fakes that listen where the real ones would; `extra` by name, `_` for `-`."""
    spec = Spec(engine="sim", served_name="m", traces=traces)
    with deployment.free_ports(len(engine_names(spec)), 0, 0) as ports:
        real = make_plan(spec, folder, ports, sys.executable, ())
    engines = tuple(p.target for p in real.processes if p.kind == "engine")

    def fake(process: Process) -> Process:
        flags: tuple[str, ...] = ("--listen", process.target, "--name", process.name)
        flags += ("--record", str(folder / "order"))
        if process.kind == "proxy":
            flags += ("--engines", *engines)
        flags += extra.get(process.name.replace("-", "_"), ())
        return dataclasses.replace(process, argv=(sys.executable, str(FAKE), *flags))

    return dataclasses.replace(real, processes=tuple(fake(process) for process in real.processes))


def alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def until(holds: Callable[[], bool]) -> None:
    """Returns when it holds.

    Raises:
        TimeoutError: it does not, for too long.
    """
    deadline = time.monotonic() + WAIT
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.02)
