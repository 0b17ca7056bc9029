"""Which transport a session uses, and why no other: a pure function of capabilities and configuration."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice between transports."""

    name: str
    """What is used; empty where none can be."""
    passed_over: Mapping[str, str]
    """Each of the others, in order of preference, and why it is not."""


def select(
    preferred: Sequence[Capabilities],
    src: MemoryKind,
    dst: MemoryKind,
    *,
    same_node: bool,
    offered: Collection[str] | None = None,
) -> Selection:
    """The first transport, in order of preference, that can join two regions.

    `offered`: transports for which the other node has made a card; None: it is not asked, since there is none.
    """
    name, passed_over = "", dict[str, str]()
    for one in preferred:
        lacks = [f"no {kind} memory" for kind in sorted({kind.value for kind in (src, dst) if kind not in one.kinds})]
        if same_node and not one.same_node:
            lacks.append("not within a node")
        if not same_node and not one.other_node:
            lacks.append("not between nodes")
        elif offered is not None and one.name not in offered:
            lacks.append("the other node does not offer it")
        if lacks:
            passed_over[one.name] = ", ".join(lacks)
        elif name:
            passed_over[one.name] = f"{name} comes first"
        else:
            name = one.name
    return Selection(name, passed_over)


def choose(
    preferred: Sequence[Capabilities],
    src: MemoryKind,
    dst: MemoryKind,
    *,
    same_node: bool,
    offered: Collection[str] | None = None,
) -> str:
    """The name of what `select` takes.

    Raises:
        TransferFailed: none can; says what each lacks.
    """
    selected = select(preferred, src, dst, same_node=same_node, offered=offered)
    if selected.name:
        return selected.name
    where = "on one node" if same_node else "between nodes"
    lacks = "; ".join(f"{name}: {why}" for name, why in selected.passed_over.items())
    raise TransferFailed(f"no transport from {src.value} to {dst.value} memory {where} ({lacks or 'none'})")
