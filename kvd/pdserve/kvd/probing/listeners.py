"""What processes listen at, as the kernel has it: the sockets that they hold, and the tables of TCP sockets."""

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from pdserve.kvd.probing.exposure import exposure
from pdserve.kvd.probing.values import Exposure, Listener
from pdserve.kvd.transport.port import Transport

GUARDED: Final = frozenset({"mori"})
"""Transports whose processes must not be reached by strangers: they give anyone who asks the keys to all memory."""
_LISTENS: Final = "0A"
"""The state, in the kernel's tables."""


class _Process(Protocol):
    pid: int
    port: int
    """Of its control port; 0 where it has none."""


@runtime_checkable
class _Hosted(Protocol):
    """A transport whose library lives in processes."""

    def processes(self) -> Sequence[_Process]:
        """Those that run."""
        ...


def guarded(transports: Sequence[Transport]) -> list[tuple[str, int, int | None]]:
    """What is to be looked at: transport, process, and the one port that matters there; None: every one does."""
    hosted = [one for one in transports if one.capabilities.name in GUARDED and isinstance(one, _Hosted)]
    return [
        (one.capabilities.name, process.pid, None if _ours(process) else process.port)
        for one in hosted
        for process in one.processes()
    ]


def _ours(process: _Process) -> bool:
    """Whether it is there for the library alone. A rank's, which is not kvd's to stop, listens for the rank too."""
    return bool(getattr(process, "sleeps", True))


def read_listeners(
    transport: str, pid: int, port: int | None = None, root: Path = Path("/proc")
) -> tuple[Listener, ...]:
    """What a process listens at (with `port`: at that port), or that it does not; nothing where it is gone. Reads
    files, a few milliseconds."""
    try:
        held = _sockets(root / str(pid) / "fd")
        found = [
            Listener(transport, pid, address, bound, exposure(address))
            for table in ("tcp", "tcp6")
            for inode, address, bound in _table(root / str(pid) / "net" / table)
            if inode in held and port in (None, bound)
        ]
    except (FileNotFoundError, ProcessLookupError):
        return ()
    except OSError as error:
        why = error.strerror or str(error)
        return (Listener(transport, pid, exposure=Exposure.UNKNOWN, why=why),)
    return tuple(found) or (Listener(transport, pid),)


def _sockets(folder: Path) -> set[str]:
    """Inodes of the sockets that a process has open."""
    held = set()
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, rest = os.readlink(folder / name).partition(":[")
            if kind == "socket":
                held.add(rest.rstrip("]"))
    return held


def _table(path: Path) -> Iterator[tuple[str, str, int]]:
    """Inode, address and port of each socket that listens, in the process's network namespace."""
    try:
        lines = path.read_text().splitlines()[1:]
    except FileNotFoundError:
        if path.name == "tcp":
            raise
        return  # a kernel without IPv6
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTENS:
            address, _, port = fields[1].rpartition(":")
            yield fields[9], _address(address), int(port, 16)


def _address(digits: str) -> str:
    """Words of 32 bits, each as this host has it in memory."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(packed))
