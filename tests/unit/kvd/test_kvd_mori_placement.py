"""Where the mori engines of a rank's device memory live, and what is said of it."""

import pytest

from pdserve.kvd.config import MoriBackend
from pdserve.kvd.transport.mori_placement import Choice, Placement, Tried, place, wants_own

RDMA, XGMI = MoriBackend.RDMA, MoriBackend.XGMI
NO = "mori cannot register an engine's memory in another process: it aborts"

TABLE = {
    # backend, of another process, of its own, does the rank host: the choice
    "a driver that lets kvd": (RDMA, "", "", False, Choice(Placement.CHILDREN, "")),
    "it does, and the rank would host": (RDMA, "", "", True, Choice(Placement.CHILDREN, "")),
    "between a node's GPUs": (XGMI, "", "", True, Choice(Placement.CHILDREN, "")),
    "a driver that does not": (RDMA, "it aborts", "", True, Choice(Placement.WORKER, NO)),
    "nor does the rank": (
        *(RDMA, "it aborts", "", False),
        Choice(None, f"{NO}; and the rank does not host mori itself"),
    ),
    "a device that takes no memory at all": (
        *(RDMA, "it aborts", "it aborts too", True),
        Choice(None, f"{NO}; nor memory of its own: it aborts too"),
    ),
    "not between a node's GPUs": (
        *(XGMI, "it aborts", "", True),
        Choice(None, f"{NO}; in the rank's own it does so for rdma alone"),
    ),
}


@pytest.mark.parametrize(("backend", "foreign", "own", "hosts", "choice"), TABLE.values(), ids=list(TABLE))
def test_engines_live_where_memory_can_be_registered(
    backend: MoriBackend, foreign: str, own: str, hosts: bool, choice: Choice
) -> None:
    """In kvd's processes wherever that can be; in a rank's only where it was seen that nothing aborts there."""
    assert place(backend, Tried(foreign, own), hosts=hosts) == choice


@pytest.mark.parametrize("backend", MoriBackend)
@pytest.mark.parametrize("foreign", ["", "it aborts"])
@pytest.mark.parametrize("hosts", [False, True])
def test_memory_of_ones_own_is_tried_where_the_choice_depends_on_it(
    backend: MoriBackend, foreign: str, hosts: bool
) -> None:
    """And nowhere else: a try costs two processes."""
    depends = place(backend, Tried(foreign, ""), hosts=hosts) != place(backend, Tried(foreign, "no"), hosts=hosts)
    assert wants_own(backend, foreign, hosts=hosts) is depends
