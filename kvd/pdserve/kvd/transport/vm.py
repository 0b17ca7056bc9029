"""Reads the memory of another process of this host (process_vm_readv): how `sim` reaches another daemon.

The kernel asks that both are one user's and that the reader may trace the other (Yama's ptrace_scope 0, or root).
"""

import ctypes
import os
from pathlib import Path
from typing import Final

import numpy as np

from pdserve.kvd.plan import Offsets

_MOST_RUNS: Final = 1024
"""IOV_MAX."""

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def born(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot: with the pid it names it for good.

    Raises:
        OSError: there is none.
    """
    # The name, in brackets, may hold anything; 22 fields before are counted from behind it.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def read(pid: int, to: Offsets, at: Offsets, length: Offsets) -> None:
    """Copies runs from addresses of a process to addresses of this one, which the caller has checked.

    Raises:
        OSError: the process is gone, may not be read, or has no memory there.
    """
    for low in range(0, len(length), _MOST_RUNS):
        part = slice(low, low + _MOST_RUNS)
        _read(pid, to[part], at[part], length[part])


def _read(pid: int, to: Offsets, at: Offsets, length: Offsets) -> None:
    total = int(length.sum())
    local, remote = np.stack((to, length), axis=1), np.stack((at, length), axis=1)  # struct iovec
    moved = _readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if moved < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if moved == total:
        return
    if moved == 0:
        raise OSError(0, "nothing could be read there")
    # Short: the kernel stops at what it cannot read, and after 2 GiB. On from there; what cannot be read says so then.
    ends = np.cumsum(length)
    first = int(np.searchsorted(ends, np.uint64(moved), side="right"))
    to, at, length = to[first:].copy(), at[first:].copy(), length[first:].copy()
    done = np.uint64(moved) - (ends[first - 1] if first else np.uint64(0))
    to[0] += done
    at[0] += done
    length[0] -= done
    _read(pid, to, at, length)
