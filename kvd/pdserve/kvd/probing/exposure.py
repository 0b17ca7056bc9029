"""Whether a socket that listens can be reached by strangers, by the address that it is bound to. Pure."""

import ipaddress

from pdserve.kvd.probing.values import Exposure, Listener

_OPEN = frozenset({Exposure.WILDCARD, Exposure.PUBLIC})


def exposure(address: str) -> Exposure:
    """Of an address as the kernel has it. Private is what `--mori-host` takes for private."""
    try:
        bound = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return Exposure.UNKNOWN
    if isinstance(bound, ipaddress.IPv6Address) and bound.ipv4_mapped is not None:
        bound = bound.ipv4_mapped
    if bound.is_unspecified:  # before the others: it counts as private
        return Exposure.WILDCARD
    if bound.is_loopback:
        return Exposure.LOOPBACK
    if bound.is_private and not bound.is_multicast and not bound.is_reserved:
        return Exposure.PRIVATE
    return Exposure.PUBLIC


def complaint(one: Listener) -> str:
    """What is wrong with it, in words; empty where nothing is."""
    where = f"{one.transport}'s control port (process {one.pid})"
    if one.exposure is Exposure.UNKNOWN:
        return f"{where} could not be looked at: {one.why or one.address}"
    if one.exposure not in _OPEN:
        return ""
    at = f"[{one.address}]:{one.port}" if ":" in one.address else f"{one.address}:{one.port}"
    bound = "every address of this host" if one.exposure is Exposure.WILDCARD else "a public address"
    return f"{where} is bound to {bound}, {at}: whoever reaches it may read all of the KV memory"
