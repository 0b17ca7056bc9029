"""The machine that the client runs on, in a few words."""

import os
import platform
from pathlib import Path

from pdserve.bench.results import Machine


def here() -> Machine:
    """Of this process; what the system does not tell is left general."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(_cpu(), len(os.sched_getaffinity(0)), round(memory, 1), f"{platform.system()} {platform.release()}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
