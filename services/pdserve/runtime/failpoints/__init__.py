"""Failpoints: named places where the system can be made to fail, for tests and for trying a deployment.

    PDSERVE_FAILPOINTS="kvd.post=1*error(TRANSFER_FAILED);clock=return(3)" pdserve-kvd ...

One table per process. Nothing is armed unless somebody arms it, and every arming and firing is
logged as a warning. `points` lists the places, `terms` is the language, `control` arms a process
from outside. What a deployment does about each fault is in docs/faults.md.
"""

from collections.abc import Hashable, Sequence
from typing import Final, TypeVar

from pdserve.runtime.failpoints.points import Kind, Point
from pdserve.runtime.failpoints.table import Count, Failpoints

__all__ = ["FAILPOINTS", "Count", "Failpoints", "Kind", "Point", "failpoint", "failpoint_now", "passing", "passing_now"]

T = TypeVar("T")

FAILPOINTS: Final = Failpoints()
"""This process's."""


async def failpoint(point: Point) -> None:
    """The work of a task goes by a point.

    Raises:
        PdserveError: the point is armed to fail.
    """
    if FAILPOINTS.armed:
        await FAILPOINTS.go_by(point)


def failpoint_now(point: Point) -> None:
    """The same where nothing can be awaited."""
    if FAILPOINTS.armed:
        FAILPOINTS.go_by_now(point)


async def passing(point: Point, item: T, lane: Hashable = None) -> Sequence[T]:
    """A message goes by a point; what of it arrives, and in which order. `lane`: its connection, where
    the point has several; a late message comes over its own."""
    if not FAILPOINTS.armed:
        return (item,)
    return FAILPOINTS.passed(point, item, await FAILPOINTS.go_by(point), lane)


def passing_now(point: Point, item: T) -> Sequence[T]:
    """The same where nothing can be awaited."""
    if not FAILPOINTS.armed:
        return (item,)
    return FAILPOINTS.passed(point, item, FAILPOINTS.go_by_now(point))
