"""The KV memory of all ranks of a simulated engine: computes steps into it and checks requests in it."""

from dataclasses import dataclass

import numpy as np

from pdserve.engine.sim.config import SimConfig
from pdserve.engine.sim.content import Words
from pdserve.engine.sim.memory import Indices, SimMemory
from pdserve.engine.sim.requests import SimRequest
from pdserve.engine.sim.scheduler import Step
from pdserve.kvd.client.rank import Memory


@dataclass(frozen=True, slots=True)
class Places:
    """Where each token of a step goes: arrays of equal length."""

    blocks: Indices
    slots: Indices
    raws: Words
    """Prefix words."""


class Kv:
    """See the module."""

    def __init__(self, config: SimConfig) -> None:
        self._block_size = config.block_size
        self.memories = [SimMemory(config, rank) for rank in range(config.ranks)]

    def regions(self) -> list[Memory]:
        """What kvd is given, by rank."""
        return [memory.region() for memory in self.memories]

    def places(self, step: Step) -> Places:
        """Where the step's tokens go."""
        blocks, slots, raws = [], [], []
        for item in step.work:
            positions = np.arange(item.start, item.start + item.count)
            blocks.append(np.asarray(item.request.block_ids, dtype=np.intp)[positions // self._block_size])
            slots.append(positions % self._block_size)
            raws.append(item.request.raws[item.start : item.start + item.count])
        return Places(np.concatenate(blocks), np.concatenate(slots), np.concatenate(raws))

    def compute(self, layer: int, places: Places) -> None:
        """One layer of a step, on every rank."""
        for memory in self.memories:
            memory.fill(layer, places.blocks, places.slots, places.raws)

    def wrong(self, request: SimRequest, tokens: int) -> str:
        """Where the KV of a request's first tokens is not what it must be; "" where all is right."""
        found = (memory.wrong(request.block_ids, request.raws[:tokens]) for memory in self.memories)
        return next(filter(None, found), "")

    def close(self) -> None:
        """Unmaps all. Safe twice."""
        for memory in self.memories:
            memory.close()
