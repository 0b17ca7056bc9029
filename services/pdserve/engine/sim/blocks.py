"""The pool of KV blocks: reference counts, a free list in order of last use, a prefix cache. Pure.

every block is either referenced (count > 0) or free; a free one may still be cached, and is
then found again until the pool needs it: the one unused for longest goes first
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.rpc.errors import PdserveError


class BlockPool:
    """Blocks 0 .. total-1. Keys name the content of a whole block with all that is before it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; their former content is forgotten.

        Raises:
            PdserveError: fewer are free; a caller must ask before.
        """
        if count > len(self._free):
            raise PdserveError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def find(self, keys: Sequence[int]) -> list[int]:
        """The cached blocks of the longest known prefix of `keys`; no reference is taken."""
        found = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            found.append(block)
        return found

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these are free (cached and not in use)."""
        return sum(self._references[block] == 0 for block in blocks)

    def reference(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives one reference of each back; the last of `blocks` is the first to be reused.

        Raises:
            PdserveError: a block that is free already.
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise PdserveError(f"block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def cache(self, block: int, key: int) -> None:
        """Makes a whole, computed block findable; the first block of a key stays."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises PdserveError unless references are exactly those of `owners`, and free + held
        (distinct blocks) is the total."""
        counts = [0] * self.total
        for blocks in owners:
            for block in blocks:
                counts[block] += 1
        if counts != self._references:
            odd = [b for b in range(self.total) if counts[b] != self._references[b]][:8]
            raise PdserveError(
                f"blocks {odd} have references {[self._references[b] for b in odd]} "
                f"and owners {[counts[b] for b in odd]}"
            )
        held = sum(count > 0 for count in counts)
        if held + len(self._free) != self.total:
            raise PdserveError(f"{held} blocks held + {len(self._free)} free are not {self.total}")
