"""One rank's KV memory: a sealed memfd, filled and checked token by token."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.engine.sim import content
from pdserve.engine.sim.config import WORD_BYTES, SimConfig
from pdserve.engine.sim.content import Words
from pdserve.kvd.client.rank import Memory
from pdserve.kvd.types import Layout, Span

Indices = npt.NDArray[np.intp]

_POISON = 0xEEEEEEEEEEEEEEEE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def layout_of(config: SimConfig) -> Layout:
    """Where the blocks of a rank are: one layer after another."""
    spans = tuple(
        (Span(layer * config.num_blocks * config.block_bytes, config.block_bytes, config.block_bytes),)
        for layer in range(config.layers)
    )
    return Layout(config.block_size, config.num_blocks, spans)


class SimMemory:
    """Words of shape (layers, blocks, tokens of a block, words of a token)."""

    def __init__(self, config: SimConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self.size = config.layers * config.num_blocks * config.block_bytes
        self.fd = os.memfd_create(f"pdserve-sim-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, self.size)
        shape = (config.layers, config.num_blocks, config.block_size, config.words)
        self._words: Words | None = np.frombuffer(self._map, dtype=np.uint64).reshape(shape)

    def region(self) -> Memory:
        """What kvd is given; valid until `close`."""
        return Memory(self.fd, self.size, layout_of(self._config))

    @property
    def words(self) -> Words:
        """The memory itself; raises ValueError after `close`."""
        if self._words is None:
            raise ValueError("the engine's memory is closed")
        return self._words

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks with what no token's KV is."""
        self.words[:, list(blocks)] = np.uint64(_POISON)

    def fill(self, layer: int, blocks: Indices, slots: Indices, raws: Words) -> None:
        """Writes the KV of tokens with these prefixes to slot `slots[i]` of block `blocks[i]`."""
        self.words[layer, blocks, slots] = content.kv(raws, layer, self._rank, self._config.words)

    def wrong(self, block_ids: Sequence[int], raws: Words) -> str:
        """Where the KV of a request's first len(raws) tokens is not what it must be, in words; ""
        where all is right."""
        count = len(raws)
        size = self._config.block_size
        used = np.asarray(block_ids[: -(-count // size)], dtype=np.intp)
        for layer in range(self._config.layers):
            found = self.words[layer, used].reshape(-1, self._config.words)[:count]
            differs = (found != content.kv(raws, layer, self._rank, self._config.words)).any(axis=1)
            if differs.any():
                first = int(np.flatnonzero(differs)[0])
                return (
                    f"rank {self._rank} layer {layer} token {first} (block {block_ids[first // size]}), "
                    f"{int(differs.sum())} of {count} tokens of that layer"
                )
        return ""

    def close(self) -> None:
        """Unmaps and closes the memory. Safe twice."""
        if self._words is None:
            return
        self._words = None
        self._map.close()
        os.close(self.fd)


assert np.dtype(np.uint64).itemsize == WORD_BYTES
