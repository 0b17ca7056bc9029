"""nixl used directly, as a process of its own, for bench_transports: `FD SIZE CARD` as arguments, a seed, a block size
and how many bytes per line of input; answers with the nanoseconds from the block lists to the last byte."""

import sys
import time
from collections.abc import Sequence

import numpy as np

from pdserve.kvd.bench_shape import scattered
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl_agent import Agent
from pdserve.kvd.transport.nixl_wire import read_card


def main(argv: Sequence[str]) -> int:
    """One agent, one request for the whole list, asked about until it is done."""
    fd, size = int(argv[0]), int(argv[1])
    card = read_card(bytes.fromhex(argv[2]), size)
    arena = Arena()
    offset = arena.map(fd, size)
    address = arena.address(offset)
    arena.view(offset, size)[:] = bytes(size)  # every page is there before anything is measured
    agent = Agent("bench", None)
    agent.register(address, size)
    peer = agent.load(card.metadata)
    for asked in sys.stdin:
        seed, block, moved = map(int, asked.split())
        runs = scattered(np.random.default_rng(seed), size, block, moved)
        began = time.monotonic_ns()
        read = agent.read(peer, runs.src + np.uint64(card.address), runs.dst + np.uint64(address), runs.length)
        while not read.done():
            pass
        sys.stdout.write(f"{time.monotonic_ns() - began}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
