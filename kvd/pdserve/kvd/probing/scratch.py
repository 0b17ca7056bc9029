"""Memory of the daemon's own that is measured with: made, told apart byte for byte, and unmapped again."""

import asyncio
import contextlib
import fcntl
import os
import uuid
from collections.abc import AsyncIterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.plan import Runs
from pdserve.kvd.probing.slot import whole
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import TransferFailed

SCRATCH_BYTES: Final = 64 << 20
"""Of one side: more than processors cache, little beside a KV cache."""
PAGE: Final = 4096
"""Bytes; the pattern is one word over a page."""
_WORDS: Final = PAGE // 8
_STEP: Final = 0x9E3779B97F4A7C15
_WRITE_BYTES: Final = 1 << 20
_LOOKS: Final = 64
"""Runs of a copy that are looked at."""


@contextlib.asynccontextmanager
async def scratch(arena: Arena, size: int, seed: int | None) -> AsyncIterator[MappedRegion]:
    """Host memory while the block runs, filled with the pattern of a seed; with zeros where there is none.

    Raises:
        TransferFailed: there is no room.
    """
    fd = os.memfd_create("pdserve-scratch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        await whole(asyncio.to_thread(_fill, fd, size, seed))  # not on the loop: it takes tens of milliseconds
        offset = arena.map(fd, size)
    except OSError as error:
        raise TransferFailed(f"no {size} bytes of scratch memory: {error.strerror}") from error
    finally:
        os.close(fd)
    try:
        yield MappedRegion(RegionKey(f"scratch-{uuid.uuid4()}", 0), MemoryKind.HOST, size, offset)
    finally:
        arena.unmap(offset)


def landed(arena: Arena, dst: MappedRegion, runs: Runs, seed: int) -> bool:
    """Whether the runs of a copy hold what its source held: the first and the last word of some of them."""
    view = arena.view(dst.offset, dst.size)
    try:
        return _same(np.frombuffer(view, np.uint64), runs, seed)
    finally:
        view.release()


def looks(runs: Runs) -> list[tuple[int, int]]:
    """Where to look whether a copy is right: pages of the source, and offsets in the destination that begin what they
    hold."""
    found = []
    for index in range(0, len(runs), max(1, len(runs) // _LOOKS)):
        src, to, length = int(runs.src[index]), int(runs.dst[index]), int(runs.length[index])
        found += [((src + at) // PAGE, to + at) for at in (0, length - 8)]
    return found


def word(seed: int, page: int) -> int:
    """What each 8 bytes of a page hold; peer.proto has it."""
    return (seed + page * _STEP) % (1 << 64)


def pattern(seed: int, first: int, pages: int) -> NDArray[np.uint64]:
    """The words of some pages."""
    numbers = np.arange(first, first + pages, dtype=np.uint64)
    return np.repeat(np.uint64(seed) + numbers * np.uint64(_STEP), _WORDS)


def _fill(fd: int, size: int, seed: int | None) -> None:
    os.ftruncate(fd, size)
    zeros = bytes(_WRITE_BYTES)
    for at in range(0, size, _WRITE_BYTES):
        part = min(_WRITE_BYTES, size - at)
        data = zeros if seed is None else pattern(seed, at // PAGE, _WRITE_BYTES // PAGE).tobytes()
        os.pwrite(fd, data[:part], at)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _same(words: NDArray[np.uint64], runs: Runs, seed: int) -> bool:
    return all(int(words[at // 8]) == word(seed, page) for page, at in looks(runs))
