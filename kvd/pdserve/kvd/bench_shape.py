"""What the benchmarks of transports copy: random blocks to random blocks."""

import numpy as np

from pdserve.kvd.plan import Runs


def scattered(random: np.random.Generator, size: int, block: int, moved: int) -> Runs:
    """`moved` bytes in blocks over regions of `size` bytes, in the order of the source as a plan has them."""
    src, dst = (random.permutation(size // block)[: moved // block].astype(np.uint64) for _ in range(2))
    order = np.argsort(src)
    return Runs(src[order] * np.uint64(block), dst[order] * np.uint64(block), np.full(len(src), block, dtype=np.uint64))
