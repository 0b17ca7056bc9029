"""One rank's KV memory: a sealed memfd, filled and checked token by token."""

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.engine.sim import content
from pdserve.engine.sim.config import WORD_BYTES, SimConfig
from pdserve.engine.sim.content import Words
from pdserve.engine.sim.layout import layout_of, views_of
from pdserve.kvd.client.rank import Memory

Indices = npt.NDArray[np.intp]

_POISON = 0xEEEEEEEEEEEEEEEE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SimMemory:
    """One rank's memory; `layout` says how it lies."""

    def __init__(self, config: SimConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        first = config.first_head(rank)
        self._heads = range(first, first + config.heads)
        self.size = config.layers * config.num_blocks * config.block_bytes
        self.fd = os.memfd_create(f"pdserve-sim-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, self.size)
        self._words: Words | None = np.frombuffer(self._map, dtype=np.uint64)
        self._views = views_of(config, self._words)

    def region(self) -> Memory:
        """What kvd is given; valid until `close`."""
        return Memory(self.fd, self.size, layout_of(self._config, self._rank))

    @property
    def words(self) -> Words:
        """The memory as (layers, blocks, tokens of a block, words of a token), where tokens lie one after another;
        raises ValueError after `close`."""
        if self._words is None:
            raise ValueError("the engine's memory is closed")
        shape = (self._config.layers, self._config.num_blocks, self._config.block_size, self._config.words)
        return self._words.reshape(shape)

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks with what no token's KV is."""
        for view in self._views:
            view[:, list(blocks)] = np.uint64(_POISON)

    def fill(self, layer: int, blocks: Indices, slots: Indices, raws: Words) -> None:
        """Writes the KV of tokens with these prefixes to slot `slots[i]` of block `blocks[i]`."""
        for view, part in self._parts(raws, layer):
            view[layer, blocks, slots] = part

    def wrong(self, block_ids: Sequence[int], raws: Words) -> str:
        """Where the KV of a request's first len(raws) tokens is not what it must be, in words; ""
        where all is right."""
        count = len(raws)
        size = self._config.block_size
        used = np.asarray(block_ids[: -(-count // size)], dtype=np.intp)
        for layer in range(self._config.layers):
            differs = np.zeros(count, dtype=bool)
            for view, part in self._parts(raws, layer):
                found = view[layer, used].reshape(-1, *part.shape[1:])[:count]
                differs |= (found != part).any(axis=(1, 2))
            if differs.any():
                first = int(np.flatnonzero(differs)[0])
                return (
                    f"rank {self._rank} layer {layer} token {first} (block {block_ids[first // size]}), "
                    f"{int(differs.sum())} of {count} tokens of that layer"
                )
        return ""

    def _parts(self, raws: Words, layer: int) -> Iterator[tuple[Words, Words]]:
        """Each array of the memory, with what the tokens with these prefixes have in it: (tokens, heads, words)."""
        each = self._config.head_words
        made = [content.kv(raws, layer, head, each) for head in self._heads]
        whole = made[0][:, None] if len(made) == 1 else np.stack(made, axis=1)
        start = 0
        for view in self._views:
            end = start + view.shape[-1]
            yield view, whole[:, :, start:end]
            start = end

    def close(self) -> None:
        """Unmaps and closes the memory. Safe twice."""
        if self._words is None:
            return
        self._words = None
        self._views = []
        self._map.close()
        os.close(self.fd)


assert np.dtype(np.uint64).itemsize == WORD_BYTES
