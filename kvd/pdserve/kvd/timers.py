"""Named deadlines: set, moved, cleared, and popped when due. The time is an argument."""

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """At most one deadline per key. A moved or cleared one leaves a dead heap entry behind."""

    def __init__(self) -> None:
        self._when: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()

    def set(self, key: K, when: float) -> None:
        """Sets or moves the deadline of `key`."""
        entry = (when, next(self._order))
        self._when[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        if len(self._heap) > 64 + 4 * len(self._when):  # mostly dead entries: renewals
            self._heap = [(*live, name) for name, live in self._when.items()]
            heapq.heapify(self._heap)

    def put_off(self, key: K, when: float) -> bool:
        """Moves a deadline that is set; whether it was."""
        if key not in self._when:
            return False
        self.set(key, when)
        return True

    def clear(self, key: K) -> None:
        """Forgets a deadline; harmless when there is none."""
        self._when.pop(key, None)

    def postpone(self, seconds: float) -> None:
        """Moves every deadline later, in the same order."""
        self._when = {key: (when + seconds, order) for key, (when, order) in self._when.items()}
        self._heap = [(*live, key) for key, live in self._when.items()]
        heapq.heapify(self._heap)

    def get(self, key: K) -> float | None:
        """When `key` is due, or None."""
        entry = self._when.get(key)
        return None if entry is None else entry[0]

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap:
            when, order, key = self._heap[0]
            if self._when.get(key) == (when, order):
                return when
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> K | None:
        """Removes and returns one key that is due at `now`, earliest first; None when none is."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._when[key]
        return key

    def __len__(self) -> int:
        return len(self._when)
