"""Which blocks a request holds: found in the prefix cache, allotted, grown, given back. Pure."""

from collections.abc import Iterable

from pdserve.engine.sim.blocks import BlockPool
from pdserve.engine.sim.config import SimConfig
from pdserve.engine.sim.requests import SimRequest


class Allotment:
    """Moves blocks between the pool and the requests."""

    def __init__(self, config: SimConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool

    def find_cached(self, request: SimRequest) -> list[int]:
        """Blocks of its leading tokens that are computed already."""
        if not self._config.prefix_cache:
            return []
        whole = (len(request.tokens) - 1) // self._config.block_size  # the last token is always computed
        return self._pool.find(request.keys(0, whole, self._config.block_size))

    def admit(self, request: SimRequest, found: list[int], tokens: int, running: Iterable[SimRequest]) -> bool:
        """Gives blocks for `tokens` tokens, `found` among them, if all of the request fits beside what running prompts
        still need."""
        missing = self._blocks(len(request.tokens)) - len(found)
        reserved = sum(max(0, self._blocks(len(r.tokens)) - len(r.block_ids)) for r in running)
        if missing + self._pool.unreferenced(found) > self._pool.free - reserved:
            return False
        self._pool.reference(found)
        request.block_ids = found + self._pool.allocate(self._blocks(tokens) - len(found))
        return True

    def grow(self, request: SimRequest, tokens: int) -> bool:
        """Gives it blocks for so many tokens; False where there are none."""
        missing = self._blocks(tokens) - len(request.block_ids)
        if missing > self._pool.free:
            return False
        if missing > 0:
            request.block_ids += self._pool.allocate(missing)
        return True

    def free(self, request: SimRequest) -> None:
        """Takes all of its blocks back."""
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.cached_blocks = 0

    def cache(self, request: SimRequest) -> None:
        """Makes the whole blocks findable that have been computed."""
        whole = request.computed // self._config.block_size
        if not self._config.prefix_cache or whole <= request.cached_blocks:
            return
        keys = request.keys(request.cached_blocks, whole, self._config.block_size)
        for block, key in zip(request.block_ids[request.cached_blocks : whole], keys, strict=True):
            self._pool.cache(block, key)
        request.cached_blocks = whole

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)
