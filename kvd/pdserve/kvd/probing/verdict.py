"""What is to be said of a measurement: what a transport may be called, what its lanes could do, what is wrong. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pdserve.kvd.probing.values import Candidate, Device, Way
from pdserve.kvd.probing.ways import XGMI
from pdserve.kvd.transport.nixl_lanes import UNKNOWN

_LANE: Final = re.compile(r"([a-z][a-z0-9_]*)/([\w.\-]+(?::\d+)?)")
"""Of UCX: "tcp/eth0", "rc_mlx5/mlx5_0:1/path0"."""
_RDMA: Final = re.compile(r"(rc|dc|ud|gga|srd)(_|$)")
"""UCX's transports over RDMA devices."""
_SLOW: Final = 0.5
"""Share of a link's nominal rate below which that is said."""
_FASTER: Final = 1.2
"""How much faster another transport is before that is said."""


def names(one: Candidate) -> tuple[str, ...]:
    """What `--expect` may call it: the transport, what its lanes or its link are (rdma, xgmi, tcp, cma, ...), UCX's own
    names."""
    carries = one.used or bool(one.measured.speeds)
    found = [one.transport, *([one.link.lower()] if one.link and carries else ())]
    for lane, _ in _lanes(one.measured.lanes):
        found += ["rdma", lane] if _RDMA.match(lane) else [lane]
    return tuple(dict.fromkeys(found))


def nominal(
    one: Candidate,
    devices: Sequence[Device],
    between: tuple[str, str] | None = None,
    links: Mapping[tuple[str, str], int] | None = None,
) -> float:
    """Nominal rate of the devices in its lanes, or of the XGMI link between two GPUs, bytes a second; 0 where that of
    one is not known."""
    if one.link == XGMI:
        return float(links.get(between, 0)) if links is not None and between is not None else 0.0
    rates = {device.name: device.bits_per_second for device in devices}
    used = {name for _, name in _lanes(one.measured.lanes) if name in rates}
    if not used or not all(rates[name] for name in used):
        return 0.0
    return sum(rates[name] for name in used) / 8


def warnings(way: Way, here: Sequence[Device], links: Mapping[tuple[str, str], int] | None = None) -> tuple[str, ...]:
    """What an operator should look at, the worst first. `links`: see Gpus."""
    used = way.used
    if used is None:
        return ()
    could = nominal(used, here, way.devices, links)
    return (*_broken(used), *_fallback(way, used, here), *_unlinked(way, used, here), *_slow(way, used, could))


def _broken(used: Candidate) -> Iterator[str]:
    if used.measured.error:
        yield f"{used.transport} will be used, and does not work as it should: {used.measured.error}"


def _fallback(way: Way, used: Candidate, here: Sequence[Device]) -> Iterator[str]:
    """RDMA is there, and something else carries the bytes."""
    lanes = used.measured.lanes
    if not way.peer or not used.measured.speeds or "rdma" in names(used):
        return
    ours, theirs = _rdma(here), _rdma(way.devices_there)
    if not ours:
        return
    shown = ", ".join(f"{device.name}{'' if device.up else ' (down)'}" for device in ours)
    if not any(device.up for device in ours):
        why = "which is down"
    elif not theirs:
        why = "and the other node has none"
    elif not any(device.up for device in theirs):
        why = "and the other node's are down"
    else:
        why = f"and so has the other: {', '.join(device.name for device in theirs if device.up)}"
    over = lanes or "no lane that it names"
    yield f"FALLBACK: {used.transport} goes over {over}, though this node has RDMA: {shown}, {why}"


def _unlinked(way: Way, used: Candidate, here: Sequence[Device]) -> Iterator[str]:
    """XGMI is asked for, and no link of it joins the two."""
    kinds = {device.name: device.kind for device in here}
    if used.link == XGMI and way.devices is not None and way.devices[0] != way.devices[1]:
        for bus in way.devices:
            if kinds.get(bus) == "gpu":
                yield f"{used.transport} is to go over XGMI, and the kernel shows none at {bus}"


def _slow(way: Way, used: Candidate, could: float) -> Iterator[str]:
    if used.measured.lanes == UNKNOWN:
        yield f"{used.transport} does not say what it goes over"
    best = used.measured.best
    if could and best and best < _SLOW * could:
        share = f"{best / could:.0%} of the link's nominal {could / 1e9:.2f} GB/s"
        yield f"{used.transport} reaches {best / 1e9:.2f} GB/s, {share}"
    for other in way.candidates:
        if best and other.measured.best > _FASTER * best:
            times = other.measured.best / best
            yield f"{other.transport} is {times:.1f} times as fast as {used.transport}, which is used"


def _rdma(devices: Sequence[Device]) -> list[Device]:
    return [device for device in devices if device.kind == "rdma"]


def _lanes(words: str) -> list[tuple[str, str]]:
    """(UCX's transport, device) of each lane."""
    return _LANE.findall(words)
