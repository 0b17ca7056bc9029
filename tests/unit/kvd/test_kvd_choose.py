"""The choice of a transport, and what is said of those that are not chosen."""

from collections.abc import Collection

import pytest

from pdserve.kvd.transport.choose import choose, select
from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed

HOST, CUDA, ROCM = MemoryKind.HOST, MemoryKind.CUDA, MemoryKind.ROCM
SHM = Capabilities("shm", frozenset({HOST}), same_node=True)
IPC = Capabilities("gpu_ipc", frozenset({CUDA}), same_node=True)
NIXL = Capabilities("nixl", frozenset({HOST, CUDA}), same_node=True, other_node=True)
FAR = Capabilities("far", frozenset({HOST, ROCM}), same_node=False, other_node=True)
ALL = (SHM, IPC, NIXL, FAR)
WITHIN, BETWEEN, OFFER = "not within a node", "not between nodes", "the other node does not offer it"

TABLE = {
    # from, to, on one node, what the other node offers: the choice, and why the others are not it
    "host": (HOST, HOST, True, None, "shm", {"gpu_ipc": "no host memory", "nixl": "shm comes first", "far": WITHIN}),
    "device": (
        *(CUDA, CUDA, True, None, "gpu_ipc"),
        {"shm": "no cuda memory", "nixl": "gpu_ipc comes first", "far": f"no cuda memory, {WITHIN}"},
    ),
    "host to device": (
        *(HOST, CUDA, True, None, "nixl"),
        {"shm": "no cuda memory", "gpu_ipc": "no host memory", "far": f"no cuda memory, {WITHIN}"},
    ),
    "between nodes": (
        *(HOST, HOST, False, ["nixl", "far"], "nixl"),
        {"shm": BETWEEN, "gpu_ipc": f"no host memory, {BETWEEN}", "far": "nixl comes first"},
    ),
    "the first is not offered": (
        *(HOST, HOST, False, ["far"], "far"),
        {"shm": BETWEEN, "gpu_ipc": f"no host memory, {BETWEEN}", "nixl": OFFER},
    ),
    "nothing is offered": (
        *(HOST, HOST, False, [], ""),
        {"shm": BETWEEN, "gpu_ipc": f"no host memory, {BETWEEN}", "nixl": OFFER, "far": OFFER},
    ),
    "another device's memory": (
        *(ROCM, ROCM, True, None, ""),
        dict.fromkeys(("shm", "gpu_ipc", "nixl"), "no rocm memory") | {"far": WITHIN},
    ),
}


@pytest.mark.parametrize(("src", "dst", "same_node", "offered", "name", "others"), TABLE.values(), ids=TABLE)
def test_the_first_that_can_is_chosen(
    src: MemoryKind,
    dst: MemoryKind,
    same_node: bool,
    offered: Collection[str] | None,
    name: str,
    others: dict[str, str],
) -> None:
    """In order of preference, by memory kinds, by place and by what the other node offers; each other one has why."""
    selected = select(ALL, src, dst, same_node=same_node, offered=offered)
    assert (selected.name, dict(selected.passed_over)) == (name, others)


def test_none_that_can_is_an_error_that_says_what_each_lacks() -> None:
    """No silent fallback: the message names every transport and what it cannot do."""
    with pytest.raises(TransferFailed, match=r"shm: no cuda.*gpu_ipc: no host"):
        choose([SHM, IPC], HOST, CUDA, same_node=True)
    with pytest.raises(TransferFailed, match=r"between nodes \(shm: not between nodes\)"):
        choose([SHM], HOST, HOST, same_node=False)
    with pytest.raises(TransferFailed, match=r"nixl: the other node does not offer it"):
        choose([NIXL], HOST, HOST, same_node=False, offered=["sim"])
    assert choose(ALL, HOST, HOST, same_node=False, offered=["nixl"]) == "nixl"
