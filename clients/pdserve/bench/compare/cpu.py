"""How many cores processes used between two moments, from /proc; and how busy the whole machine was.

A process's time is user and system time of all its threads, of its live descendants, and of those it has waited for.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
OTHERS = "others"
"""All that the machine did besides."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of /proc/PID/stat."""

    pid: int
    parent: int
    seconds: float
    """Used so far: utime + stime, and those of children that have ended and were waited for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment."""

    at: float
    """Monotonic seconds."""
    seconds: Mapping[str, float]
    """CPU seconds used so far, by name; a process that is gone is not there."""
    machine: float
    """CPU seconds that all cores together were busy."""


def parse(line: str) -> Stat:
    """A line of /proc/PID/stat; the name in it may have spaces and brackets (proc(5))."""
    pid, _, rest = line.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    # Behind the name: state, ppid, ... utime is field 14 of the line, 11 of these.
    return Stat(int(pid), int(fields[1]), sum(int(ticks) for ticks in fields[11:15]) * _TICK)


def read(groups: Mapping[str, int]) -> Reading:
    """What the processes have used, by name; `groups` has the first process of each."""
    stats = {stat.pid: stat for stat in _stats()}
    owner: dict[int, str] = {pid: name for name, pid in groups.items()}
    used: dict[str, float] = {name: 0.0 for name, pid in groups.items() if pid in stats}
    for stat in stats.values():
        if name := _owner(stat, stats, owner):
            used[name] += stat.seconds
    return Reading(time.monotonic(), used, _machine())


def cores(before: Reading, after: Reading) -> dict[str, float]:
    """Cores used, on average, by name; `OTHERS` is what is left of the machine's busy time.

    Raises:
        ValueError: no time has passed.
    """
    wall = after.at - before.at
    if wall <= 0:
        raise ValueError("two readings of one moment")
    found = {
        name: max(after.seconds[name] - used, 0.0) / wall
        for name, used in before.seconds.items()
        if name in after.seconds
    }
    found[OTHERS] = max((after.machine - before.machine) / wall - sum(found.values()), 0.0)
    return found


def _owner(stat: Stat, stats: Mapping[int, Stat], owner: Mapping[int, str]) -> str:
    """The group of the nearest ancestor that leads one; a leader belongs to itself."""
    seen: Stat | None = stat
    while seen is not None:
        if seen.pid in owner:
            return owner[seen.pid]
        seen = stats.get(seen.parent)
    return ""


def _stats() -> Iterable[Stat]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            line = (folder / "stat").read_text()
        except OSError:
            continue  # it has just ended
        yield parse(line)


def _machine() -> float:
    """Busy time of all cores: the first line of /proc/stat without idle and iowait (proc(5))."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * _TICK
