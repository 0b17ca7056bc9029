"""The GPUs of this node and the XGMI links between them, as the kernel shows them.

NVIDIA's driver lists its devices below /proc. AMD's shows what can compute as nodes of a topology (kfd), with the
links between them; which devices have XGMI at all, amdgpu says beside each (xgmi_device_id), without a rate.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pdserve.kvd.probing.devices import folders, number, text
from pdserve.kvd.probing.values import Device, Gpus

_KFD: Final = "sys/class/kfd/kfd/topology/nodes"
_XGMI: Final = 11
"""The type of such a link, in the kernel's words CRAT_IOLINK_TYPE_XGMI."""


def read_gpus(root: Path = Path("/")) -> Gpus:
    """What there is; what cannot be read counts as not there, a rate as not known. Blocks."""
    links = dict(_links(root / _KFD))
    joined = {bus for pair in links for bus in pair} | set(_with_xgmi(root / "sys/class/drm"))
    amd = sorted({*_amd(root / _KFD).values(), *joined})
    return Gpus((*_nvidia(root), *(_device(bus, bus in joined, links) for bus in amd)), links)


def _device(bus: str, joined: bool, links: Mapping[tuple[str, str], int]) -> Device:
    if not joined:
        return Device(bus, "gpu", up=True)
    rates = [rate for (source, _), rate in links.items() if source == bus]
    return Device(bus, "xgmi", 8 * min(rates, default=0), up=True)


def _nvidia(root: Path) -> Iterator[Device]:
    listed = [folder.name.lower() for folder in folders(root / "proc/driver/nvidia/gpus")]
    # In a container that list may be hidden, and the devices are there all the same.
    nodes = [path.name for path in folders(root / "dev") if path.name.removeprefix("nvidia").isdecimal()]
    for name in listed or nodes:
        yield Device(name, "gpu", up=True)


def _amd(nodes: Path) -> dict[str, str]:
    """Number of a node -> PCI bus id, of those that are GPUs."""
    found = {}
    for node in folders(nodes):
        if number(text(node / "gpu_id")) > 0:
            said = _properties(node / "properties")
            where = said.get("location_id", 0)
            found[node.name] = (
                f"{said.get('domain', 0):04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 0x1F:02x}.{where & 7}"
            )
    return found


def _links(nodes: Path) -> Iterator[tuple[tuple[str, str], int]]:
    buses = _amd(nodes)
    for node in folders(nodes):
        for link in folders(node / "io_links"):
            said = _properties(link / "properties")
            ends = (buses.get(str(said.get("node_from"))), buses.get(str(said.get("node_to"))))
            if said.get("type") == _XGMI and ends[0] is not None and ends[1] is not None:
                yield (ends[0], ends[1]), said.get("max_bandwidth", 0) * 10**6  # it says MB/s


def _with_xgmi(cards: Path) -> Iterator[str]:
    for card in folders(cards):
        if text(card / "device/xgmi_device_id"):
            yield (card / "device").resolve().name


def _properties(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in text(path).splitlines()]
    return {pair[0]: number(pair[1]) for pair in pairs if len(pair) == 2}
