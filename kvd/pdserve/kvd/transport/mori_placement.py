"""Where the MORI engines of a rank's device memory live. Pure.

A driver that registers memory of other processes lets kvd's own processes do all of it. One that does not leaves the
rank's process, where that was offered, and where it was seen that memory of one's own can be registered at all: mori
aborts where it cannot.
"""

import enum
from dataclasses import dataclass

from pdserve.kvd.config import MoriBackend


class Placement(enum.Enum):
    """Who has the engines."""

    CHILDREN = "kvd's processes"
    WORKER = "the rank's process"


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of registering a device's memory, in processes that are there for that alone; empty where it went
    well, or was not tried."""

    foreign: str
    """Memory of the rank, opened by its handle."""
    own: str
    """Memory of the process that registers it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is made of it."""

    placement: Placement | None
    """None: nowhere."""
    why: str
    """Why not in kvd's processes, and where nowhere, why not in the rank's either; empty for kvd's processes."""


def wants_own(backend: MoriBackend, foreign: str, *, hosts: bool) -> bool:
    """Whether it is to be tried what becomes of memory of one's own."""
    return bool(foreign) and hosts and backend is MoriBackend.RDMA


def place(backend: MoriBackend, tried: Tried, *, hosts: bool) -> Choice:
    """`hosts`: the rank takes orders."""
    if not tried.foreign:
        return Choice(Placement.CHILDREN, "")
    why = f"mori cannot register an engine's memory in another process: {tried.foreign}"
    if backend is MoriBackend.XGMI:
        return Choice(None, f"{why}; in the rank's own it does so for rdma alone")
    if not hosts:
        return Choice(None, f"{why}; and the rank does not host mori itself")
    if tried.own:
        return Choice(None, f"{why}; nor memory of its own: {tried.own}")
    return Choice(Placement.WORKER, why)
