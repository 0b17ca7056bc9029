"""A way out of what is known of it: what would be used, why no other, and what each was measured to do. Pure."""

from collections.abc import Collection, Mapping, Sequence

from pdserve.kvd.config import TransportName
from pdserve.kvd.probing.values import NOT_MEASURED, Candidate, Measured, Offer, Way
from pdserve.kvd.transport.choose import select
from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed


def way(
    peer: str,
    kind: MemoryKind,
    able: Sequence[Capabilities],
    offer: Offer | None,
    measured: Mapping[str, Measured],
    left_out: Mapping[str, str],
) -> Way:
    """From memory of a kind, at a peer that makes an offer or within this node (None), to memory of that kind here.

    `measured` is of host memory; `left_out`: transports that this daemon does not have, and why.
    """
    offered = None if offer is None else offer.cards
    selected = select(able, kind, kind, same_node=offer is None, offered=offered)
    refused: Mapping[str, str] = {} if offer is None else offer.refused
    why_not = {
        name: f"{why}: {refused[name]}" if name in refused else why for name, why in selected.passed_over.items()
    }
    known = measured if kind is MemoryKind.HOST else {}
    candidates = [
        Candidate(one.name, one.name == selected.name, why_not.get(one.name, ""), known.get(one.name, NOT_MEASURED))
        for one in able
    ]
    candidates += [Candidate(name, False, why) for name, why in left_out.items()]
    error = reason = ""
    if not selected.name:
        lacks = "; ".join(f"{name}: {why}" for name, why in why_not.items())
        error, reason = f"no transport can ({lacks or 'there is none'})", TransferFailed.reason
    return Way(peer, kind, candidates=tuple(candidates), error=error, reason=reason)


def left_out(names: Collection[str]) -> dict[str, str]:
    """The transports that a daemon with these does not have, and why; sim, which is for tests, is not missed."""
    wanted = [one.value for one in TransportName if one is not TransportName.SIM]
    return {name: f"not switched on: --transport {name}" for name in wanted if name not in names}
