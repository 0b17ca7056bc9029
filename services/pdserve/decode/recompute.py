"""A cap on prompts that are computed at decode because their hand-over failed.

Each such prompt stalls every running stream for as long as it computes: past the cap a request fails
instead, and the proxy may try it elsewhere.
"""

import asyncio

from pdserve.rpc.errors import IncompatibleEngines, PdserveError, TicketForged, TransferUsed

_NEVER = (TransferUsed, TicketForged, IncompatibleEngines)


def worth_recomputing(error: PdserveError) -> bool:
    """Whether the prompt may be computed here after this: not where the request itself is wrong."""
    return not isinstance(error, _NEVER)


class RecomputeSlots:
    """Counts prompts that are being computed after failed hand-overs."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.running = 0
        self.refused = 0
        """Since the start."""

    async def hold(self, until: asyncio.Event) -> bool:
        """Holds a slot until the event; False, at once, where none is free."""
        if self.running == self._limit:
            self.refused += 1
            return False
        self.running += 1
        try:
            await until.wait()
        finally:
            self.running -= 1
        return True
