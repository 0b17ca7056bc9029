"""Lends scratch memory to another daemon that measures: of bounded size, for a bounded time, to one at a time."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.kvd.probing.scratch import SCRATCH_BYTES, scratch
from pdserve.kvd.probing.slot import Slot, whole
from pdserve.kvd.probing.values import Device, Offer
from pdserve.kvd.reaching import forget, reaching
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import MappedRegion, Transport
from pdserve.rpc.errors import InvalidRequest, PdserveError, Unavailable

_LENT_S: Final = 30.0
"""After which it is taken back, whoever still reads."""
_UNIT: Final = 1 << 20


class Lent:
    """Memory that is lent; see peers.lending.Loan."""

    def __init__(self) -> None:
        self.offer: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def ready(self) -> Offer:
        """See Loan."""
        return await asyncio.shield(self.offer)

    async def over(self) -> None:
        """See Loan."""
        assert self.task is not None
        await asyncio.wait([self.task])

    def end(self) -> None:
        """See Loan."""
        self.ended.set()

    def fail(self, error: PdserveError) -> None:
        """There is nothing to lend, or not any more."""
        if not self.offer.done():
            self.offer.set_exception(error)
            self.offer.exception()  # whoever waits hears of it; nobody has to


class Loans:
    """See the module."""

    def __init__(
        self,
        slot: Slot,
        arena: Arena,
        transports: Sequence[Transport],
        devices: Callable[[], tuple[Device, ...]],
        seconds: float = _LENT_S,
    ) -> None:
        """`devices` reads those of this node, and may block."""
        self._slot = slot
        self._arena = arena
        self._reaching = reaching(transports)
        self._devices = devices
        self._seconds = seconds

    def lend(self, nbytes: int, who: str) -> Lent:
        """Begins to lend memory to another daemon.

        Raises:
            InvalidRequest: too little or too much.
            Overloaded: something is measured, or lent to another.
            Unavailable: the daemon stops.
        """
        if not _UNIT <= nbytes <= SCRATCH_BYTES or nbytes % _UNIT:
            raise InvalidRequest(f"{nbytes} bytes of scratch memory; whole MiB, {SCRATCH_BYTES} bytes at most")
        lent = Lent()
        lent.task = self._slot.take(f"lends memory to {who}", lambda: self._lend(lent, nbytes))
        return lent

    async def _lend(self, lent: Lent, nbytes: int) -> None:
        seed = random.getrandbits(64)
        try:
            async with scratch(self._arena, nbytes, seed) as region:
                try:
                    cards, refused = await self._cards(region)
                    devices = await asyncio.to_thread(self._devices)
                    lent.offer.set_result(Offer(nbytes, seed, cards, refused, devices))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._seconds):
                            await lent.ended.wait()
                finally:
                    await whole(forget(self._reaching, region))
        except PdserveError as error:
            lent.fail(error)
        except BaseException:
            lent.fail(Unavailable("this kvd stops"))
            raise

    async def _cards(self, region: MappedRegion) -> tuple[dict[str, bytes], dict[str, str]]:
        cards: dict[str, bytes] = {}
        refused: dict[str, str] = {}
        for name, transport in self._reaching.items():
            if region.kind in transport.capabilities.kinds:
                try:
                    cards[name] = await transport.card(region)
                except PdserveError as error:
                    refused[name] = error.message
        return cards, refused
