"""A service's hold on one transfer: on every way out it is given up, unless it has ended."""

from types import TracebackType
from typing import Self

from pdserve.engine.hosting.handoffs import Handoffs, Watch
from pdserve.rpc.errors import KvdUnavailable, PdserveError, RequestCancelled


class Held:
    """`with Held(...)` cancels the transfer at kvd when it is left before all watched ends have come from there.

    Also before anything is watched: a request that was refused at the door tells the other side.
    """

    def __init__(self, handoffs: Handoffs, transfer_id: bytes, failed: type[PdserveError]) -> None:
        """`failed`: what the other side is told where this side failed, rather than was left."""
        self._handoffs = handoffs
        self._transfer_id = transfer_id
        self._failed = failed
        self._watches: list[Watch] = []

    def watch(self, consumer: int | None) -> Watch:
        """Watches the producer's end (None) or that of one consumer; see Handoffs.register."""
        watch = self._handoffs.register(self._transfer_id, consumer)
        self._watches.append(watch)
        return watch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._watches or not all(_ended_at_kvd(watch) for watch in self._watches):
            reason = self._failed.reason if isinstance(error, Exception) else RequestCancelled.reason
            self._handoffs.cancel(self._transfer_id, reason)
        for watch in self._watches:
            watch.close()


def _ended_at_kvd(watch: Watch) -> bool:
    """That kvd was lost is this side's own word: a restarted daemon may have the transfer all the same, from an engine
    that was attached to it before its service was."""
    return watch.result is not None and watch.result.reason != KvdUnavailable.reason
