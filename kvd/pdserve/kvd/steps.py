"""What the notices of engines' steps do: blocks become known, layers become ready. Pure.

Nothing here can fail a hand-over but a chunk that names blocks which are being filled for another:
what is late, lost, repeated or unknown only costs overlap.
"""

from collections.abc import Callable, Iterable

from pdserve.kvd.book import Book, Step, orphan_timer
from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.effects import Stop
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import ProducerEnd, Transfer
from pdserve.kvd.notices import Chunk, LayerReady, Notice, StepBegin
from pdserve.kvd.pairing import Pairing
from pdserve.kvd.progress import Progress
from pdserve.rpc.errors import InvalidRequest


class Steps:
    """See the module."""

    def __init__(self, book: Book, pairing: Pairing, endings: Endings) -> None:
        self._book = book
        self._pairing = pairing
        self._endings = endings

    def hear(self, notice: Notice, now: float) -> bool:
        """Takes one notice; False where it speaks of an engine or rank that is not here."""
        entry = self._book.registry.get(notice.engine_id)
        if entry is None or entry.ended or not 0 <= notice.rank < max(entry.ranks, 1):
            return False
        self._book.touched[notice.engine_id] = now
        key = (notice.engine_id, notice.rank)
        if isinstance(notice, StepBegin):
            self._book.steps[key] = Step(notice.step, notice.chunks)
            for chunk in notice.chunks:
                self._learn(notice.engine_id, chunk, now)
            return True
        step = self._book.steps.get(key)
        if step is None or step.number != notice.step:
            return True  # its begin was dropped
        region = entry.regions.get(notice.rank)
        layers = len(region.layout.layers) if region else 0
        if isinstance(notice, LayerReady):
            if 0 <= notice.layer < layers:
                self._ready(notice.engine_id, notice.rank, (notice.layer,), step.chunks, now)
        else:
            self._ready(notice.engine_id, notice.rank, range(layers), step.chunks, now)
            del self._book.steps[key]
        return True

    def adopt(self, transfer: Transfer, end: ProducerEnd, now: float) -> None:
        """A begin finds chunks that came before it: holds their blocks too."""
        self._hold(transfer, end, end.progress.block_ids, now)

    def _learn(self, engine_id: str, chunk: Chunk, now: float) -> None:
        found = self._book.handles.get((engine_id, chunk.handle))
        if found is None:
            progress = self._orphan(engine_id, chunk.handle, now)
            if progress is not None:
                progress.add(chunk)
            return
        transfer, end = found
        if isinstance(end, ProducerEnd) and end.stop is None and end.fencing_attempt is None:
            new = end.progress.add(chunk)
            if new:
                self._hold(transfer, end, new, now)

    def _hold(self, transfer: Transfer, end: ProducerEnd, blocks: list[int], now: float) -> None:
        entry = self._book.registry.get(end.engine_id)
        total = entry.num_blocks if entry else 0
        problem = self._book.leases.conflict(end.engine_id, blocks, writable=False)
        if not problem and total and blocks and max(blocks) >= total:
            problem = f"block {max(blocks)} of {total}"
        if problem:
            stop = Stop(Outcome.FAILED, InvalidRequest.reason, f"a chunk names blocks that it cannot hold: {problem}")
            self._endings.stop_transfer(transfer, stop, stop, now)
        else:
            self._book.leases.extend(end.lease, blocks)

    def _orphan(self, engine_id: str, handle: str, now: float) -> Progress | None:
        """Where chunks of a handle go that has not begun yet; None where it is over, or there are too many."""
        book, key = self._book, (engine_id, handle)
        if key in book.ended_handles:
            return None
        if key not in book.orphans:
            if len(book.orphans) >= book.limits.max_parked:
                return None
            book.orphans[key] = Progress()
            book.timers.set(orphan_timer(key), now + book.limits.park)
        return book.orphans[key]

    def _ready(self, engine_id: str, rank: int, layers: Iterable[int], chunks: tuple[Chunk, ...], now: float) -> None:
        for chunk in chunks:
            key = (engine_id, chunk.handle)
            found = self._book.handles.get(key)
            if found is None:
                orphan = self._book.orphans.get(key)
                if orphan is not None:
                    self._raise(orphan.layer_ready, rank, layers, chunk)
                continue
            transfer, end = found
            if isinstance(end, ProducerEnd):
                risen = self._raise(end.progress.layer_ready, rank, layers, chunk)
                if risen:
                    self._pairing.pump(transfer, now, rank, risen)

    @staticmethod
    def _raise(
        layer_ready: Callable[[int, int, Chunk], bool], rank: int, layers: Iterable[int], chunk: Chunk
    ) -> tuple[int, ...]:
        return tuple(layer for layer in layers if layer_ready(rank, layer, chunk))
