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
    for device in folders(folder):
        if device.name == "lo":
            continue
        # What is not a device (veth, a bridge) names a speed that means nothing; -1 is a device that does not know.
        megabits = number(text(device / "speed")) if (device / "device").exists() else 0
        yield Device(device.name, "net", max(0, megabits) * 10**6, text(device / "operstate") in ("up", "unknown"))


def _rdma(folder: Path) -> Iterator[Device]:
    for device in folders(folder):
        for port in folders(device / "ports"):
            rate = _RATE.match(text(port / "rate"))
            bits = round(float(rate[1]) * 1e9) if rate else 0
            yield Device(f"{device.name}:{port.name}", "rdma", bits, "ACTIVE" in text(port / "state"))


def folders(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing where there is none."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def text(path: Path) -> str:
    """What a file says; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def number(words: str) -> int:
    """Digits, with a sign or not; 0 where it is something else."""
    return int(words) if words.lstrip("-").isdecimal() else 0
