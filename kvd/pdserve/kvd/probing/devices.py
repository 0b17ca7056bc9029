"""The network and RDMA devices of this node, as the kernel shows them below /sys/class."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pdserve.kvd.probing.values import Device

_RATE: Final = re.compile(r"([0-9.]+)\s*Gb/sec")


def read_devices(root: Path = Path("/sys/class")) -> tuple[Device, ...]:
    """What there is, by name; what cannot be read of one counts as not known. Blocks: some drivers ask the device."""
    return (*_net(root / "net"), *_rdma(root / "infiniband"))


def _net(folder: Path) -> Iterator[Device]:
    for device in _folders(folder):
        if device.name == "lo":
            continue
        # What is not a device (veth, a bridge) names a speed that means nothing; -1 is a device that does not know.
        megabits = _number(_text(device / "speed")) if (device / "device").exists() else 0
        yield Device(device.name, "net", max(0, megabits) * 10**6, _text(device / "operstate") in ("up", "unknown"))


def _rdma(folder: Path) -> Iterator[Device]:
    for device in _folders(folder):
        for port in _folders(device / "ports"):
            rate = _RATE.match(_text(port / "rate"))
            bits = round(float(rate[1]) * 1e9) if rate else 0
            yield Device(f"{device.name}:{port.name}", "rdma", bits, "ACTIVE" in _text(port / "state"))


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() else 0
