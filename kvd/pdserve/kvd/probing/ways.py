"""A way out of what is known of it: what would be used, why no other, and what each was measured to do. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pdserve.kvd.config import TransportName
from pdserve.kvd.probing.values import NOT_MEASURED, Candidate, Measured, Offer, Way
from pdserve.kvd.transport.choose import select
from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed

XGMI: Final = "XGMI"
RDMA: Final = "RDMA"
_NOTHING: Final[Mapping[str, str]] = {}


def way(
    peer: str,
    kind: MemoryKind,
    able: Sequence[Capabilities],
    offer: Offer | None,
    measured: Mapping[str, Measured],
    left_out: Mapping[str, str],
    *,
    unable: Mapping[str, str] = _NOTHING,
    needed: bool = True,
) -> Way:
    """From memory of a kind, at a peer that makes an offer or within this node (None), to memory of that kind here.

    `measured` is of memory of that kind. `left_out`: transports that this daemon does not have, and why; `unable`:
    those that it has, and that cannot take such memory here, and why. `needed`: it is an error where none can.
    """
    offered = None if offer is None else offer.cards
    fit = [one for one in able if one.name not in unable]
    selected = select(fit, kind, kind, same_node=offer is None, offered=offered)
    refused: Mapping[str, str] = {} if offer is None else offer.refused
    why_not = {
        name: f"{why}: {refused[name]}" if name in refused else why for name, why in selected.passed_over.items()
    }
    why_not |= unable
    candidates = [
        Candidate(
            one.name,
            one.name == selected.name,
            why_not.get(one.name, ""),
            measured.get(one.name, NOT_MEASURED),
            link_of(one),
        )
        for one in able
    ]
    candidates += [Candidate(name, False, why) for name, why in left_out.items()]
    error = reason = ""
    if not selected.name and needed:
        lacks = "; ".join(f"{name}: {why}" for name, why in why_not.items())
        error, reason = f"no transport can ({lacks or 'there is none'})", TransferFailed.reason
    return Way(peer, kind, candidates=tuple(candidates), error=error, reason=reason)


def link_of(one: Capabilities) -> str:
    """What a transport goes over that has no choice and does not say so: of mori, its backend. That for XGMI is the one
    that reaches no other node."""
    if one.name != TransportName.MORI.value:
        return ""
    return RDMA if one.other_node else XGMI


def left_out(names: Collection[str], *, gpus: bool = True) -> dict[str, str]:
    """The transports that a daemon with these does not have, and why; sim, which is for tests, is not missed. `gpus`:
    there are some here."""
    wanted = [one.value for one in TransportName if one is not TransportName.SIM]
    why = {name: f"not switched on: --transport {name}" for name in wanted if name not in names}
    if not gpus and TransportName.GPU_IPC.value in why:
        why[TransportName.GPU_IPC.value] = "no GPU is seen on this node"
    return why


def pairs(buses: Sequence[str]) -> list[tuple[str, str]]:
    """Between which GPUs device memory is measured: within each, and to each from the one before it."""
    within = [(bus, bus) for bus in buses]
    across = list(zip((buses[-1], *buses[:-1]), buses, strict=True)) if len(buses) > 1 else []
    return within + across
