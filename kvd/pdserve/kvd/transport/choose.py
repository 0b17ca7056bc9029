"""Which transport a session uses: a pure function of capabilities and configuration."""

from collections.abc import Sequence

from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed


def choose(preferred: Sequence[Capabilities], src: MemoryKind, dst: MemoryKind, *, same_node: bool) -> str:
    """The name of the first transport, in order of preference, that can join the two regions.

    Raises:
        TransferFailed: none can; says what each lacks.
    """
    lacks: list[str] = []
    for one in preferred:
        missing = sorted({kind.value for kind in (src, dst) if kind not in one.kinds})
        if not (one.same_node if same_node else one.other_node):
            missing.append("one node" if same_node else "two nodes")
        if not missing:
            return one.name
        lacks.append(f"{one.name}: no {', '.join(missing)}")
    where = "on one node" if same_node else "between nodes"
    raise TransferFailed(f"no transport from {src.value} to {dst.value} memory {where} ({'; '.join(lacks) or 'none'})")
