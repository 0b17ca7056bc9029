"""The choice of a transport."""

import pytest

from pdserve.kvd.transport.choose import choose
from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed

HOST, CUDA = MemoryKind.HOST, MemoryKind.CUDA
SHM = Capabilities("shm", frozenset({HOST}), same_node=True)
IPC = Capabilities("gpu_ipc", frozenset({CUDA}), same_node=True)
NIXL = Capabilities("nixl", frozenset({HOST, CUDA}), same_node=True, other_node=True)


@pytest.mark.parametrize(
    ("src", "dst", "same_node", "name"),
    [(HOST, HOST, True, "shm"), (CUDA, CUDA, True, "gpu_ipc"), (HOST, CUDA, True, "nixl"), (HOST, HOST, False, "nixl")],
)
def test_the_first_that_can_is_chosen(src: MemoryKind, dst: MemoryKind, same_node: bool, name: str) -> None:
    """In order of preference, by memory kinds and by place."""
    assert choose([SHM, IPC, NIXL], src, dst, same_node=same_node) == name


def test_none_that_can_is_an_error_that_says_what_each_lacks() -> None:
    """No silent fallback: the message names every transport and what it cannot do."""
    with pytest.raises(TransferFailed, match=r"shm: no cuda.*gpu_ipc: no host"):
        choose([SHM, IPC], HOST, CUDA, same_node=True)
    with pytest.raises(TransferFailed, match=r"shm: no two nodes"):
        choose([SHM], HOST, HOST, same_node=False)
