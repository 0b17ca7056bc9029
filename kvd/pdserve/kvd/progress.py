"""What kvd knows of one producer's prompt so far: its blocks, and per rank and layer how many of
the leading ones are in memory. Pure.

    prompt blocks   | 0 ... ready(rank, layer)-1 | ... known-1 | not yet computed
                      may be copied                ids known
"""

from collections.abc import Sequence

from pdserve.kvd.notices import Chunk


class Progress:
    """One attempt of one producer; a later attempt starts from nothing."""

    def __init__(self, attempt: int = 0) -> None:
        self.attempt = attempt
        self.block_ids: list[int] = []
        self.complete = False
        self._ready: dict[tuple[int, int], int] = {}

    def reset(self, attempt: int) -> None:
        """Forgets everything: the blocks of earlier attempts are not the producer's any more."""
        self.attempt = attempt
        self.block_ids = []
        self.complete = False
        self._ready = {}

    def add(self, chunk: Chunk) -> list[int]:
        """Learns a chunk's blocks; the ones that are new.

        A chunk of another attempt, one after a gap (a notice was lost) and one that contradicts
        what is known teach nothing: the offer will say all.
        """
        known = len(self.block_ids)
        if chunk.attempt != self.attempt or self.complete or chunk.first_block > known:
            return []
        overlap = self.block_ids[chunk.first_block :][: len(chunk.block_ids)]
        if list(chunk.block_ids[: len(overlap)]) != overlap:
            return []
        new = list(chunk.block_ids[known - chunk.first_block :])
        self.block_ids.extend(new)
        return new

    def layer_ready(self, rank: int, layer: int, chunk: Chunk) -> bool:
        """Whether the chunk's layer on this rank makes more blocks ready."""
        if chunk.attempt != self.attempt or self.complete:
            return False
        blocks = min(chunk.ready_blocks, len(self.block_ids))
        if blocks <= self._ready.get((rank, layer), 0):
            return False
        self._ready[rank, layer] = blocks
        return True

    def finish(self, block_ids: Sequence[int]) -> bool:
        """The offer: these are all blocks, and all are ready. False where the chunks, whose
        blocks may have been copied already, said otherwise."""
        if self.block_ids != list(block_ids[: len(self.block_ids)]):
            return False
        self.block_ids = list(block_ids)
        self.complete = True
        return True

    def ready(self, rank: int, layer: int) -> int:
        """Leading prompt blocks whose KV of this rank and layer is in memory."""
        return len(self.block_ids) if self.complete else self._ready.get((rank, layer), 0)
