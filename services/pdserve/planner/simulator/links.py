"""Transfers under way, and how they share the engines' links. Pure.

Each engine has a link with one bandwidth in each direction. A transfer moves at the smaller of its
producer's outward share and its consumer's inward share, where a link is shared evenly.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Flow:
    """One transfer."""

    request: int
    attempt: int
    producer: int
    consumer: int
    left: float
    """Bytes."""
    rate: float = 0.0
    """Bytes per second."""


class Links:
    """All transfers of a fleet."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._flows: list[Flow] = []
        self._now = 0.0
        self.version = 0
        """Raised whenever a rate may have changed."""
        self.moved = 0.0
        """Bytes so far."""

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, now: float, flow: Flow) -> None:
        """A transfer begins."""
        self._advance(now)
        self._flows.append(flow)
        self._share()

    def drop(self, now: float, request: int) -> None:
        """A request's transfer is given up; nothing where it has none."""
        self._advance(now)
        self._flows = [flow for flow in self._flows if flow.request != request]
        self._share()

    def next_end(self) -> float | None:
        """When the next transfer ends if none is added; None: none is under way."""
        if not self._flows:
            return None
        return self._now + min(flow.left / flow.rate for flow in self._flows)

    def ended(self, now: float) -> list[Flow]:
        """Takes out those that end by `now`, which is what `next_end` said: at least one does."""
        ending = min(flow.left / flow.rate for flow in self._flows)
        ended = [flow for flow in self._flows if flow.left / flow.rate <= ending * (1 + 1e-12)]
        self._advance(now)
        self._flows = [flow for flow in self._flows if flow not in ended]
        self._share()
        return ended

    def _advance(self, now: float) -> None:
        for flow in self._flows:
            moved = min(flow.left, flow.rate * (now - self._now))
            flow.left -= moved
            self.moved += moved
        self._now = now

    def _share(self) -> None:
        self.version += 1
        leaving: dict[int, int] = {}
        coming: dict[int, int] = {}
        for flow in self._flows:
            leaving[flow.producer] = leaving.get(flow.producer, 0) + 1
            coming[flow.consumer] = coming.get(flow.consumer, 0) + 1
        for flow in self._flows:
            flow.rate = self._bandwidth / max(leaving[flow.producer], coming[flow.consumer])
