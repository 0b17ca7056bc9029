"""Transfers between two stub engines: started in an open or a closed loop, each end counted.

Both stubs live in one process, beside the daemon's: on two cores a third process would take its
time from one of the two, and the two stamps of a hand-over come from one loop anyway.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from pdserve.kvd.client import Accept, End, Offer, Outcome, Participant
from pdserve.kvd.testing import FakeEngine, KvdAddress, plain_layout
from pdserve.kvd.types import TRANSFER_ID_BYTES, Mode

BLOCKS: Final = 8
"""Of each transfer."""
_LAYERS: Final = 4
_BLOCK_BYTES: Final = 16 << 10
"""With 8 blocks and 4 layers 512 KiB a transfer: more than kvd copies on its event loop."""
_POOL: Final = 1024
"""Blocks of each engine."""
_END_S: Final = 60.0
"""Longest wait for an end."""
_WORKERS_S: Final = 5.0
"""Longest wait for workers to hear what every scheduler has."""

Who = tuple[str, Participant]
"""A side, "p" or "d", and one of its participants."""
_EVERYBODY: Final = tuple((side, kind) for side in "pd" for kind in (Participant.SCHEDULER, Participant.WORKER))


class Tally:
    """How often each participant heard the end of each transfer. Pure.

    Schedulers drop an end that comes again, workers do not: what kvd says twice is seen there.
    """

    def __init__(self, total: int, everybody: Iterable[Who] = _EVERYBODY) -> None:
        self._heard = {who: bytearray(total) for who in everybody}
        self.reasons: Counter[str] = Counter()
        """Ends that were not good, by reason."""

    def hear(self, who: Who, number: int, end: End) -> None:
        """One end; `number` is its transfer's, from 0."""
        heard = self._heard[who]
        heard[number] = min(heard[number] + 1, 255)
        if end.outcome is not (Outcome.RELEASED if who[0] == "p" else Outcome.LANDED):
            self.reasons[end.reason or end.outcome.value] += 1

    @property
    def missing(self) -> int:
        """Ends that a participant never heard."""
        return sum(heard.count(0) for heard in self._heard.values())

    @property
    def repeated(self) -> int:
        """Ends that a participant heard more than once."""
        return sum(len(heard) - heard.count(0) - heard.count(1) for heard in self._heard.values())


@dataclass(slots=True)
class _Open:
    """A transfer that a scheduler has not heard the end of."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    sample: bool
    sent_ns: int
    sides: set[str] = field(default_factory=lambda: {"p", "d"})
    """Whose scheduler has not heard its end."""


class Traffic:
    """Two engines and their transfers, `total` in all; `async with` starts and ends it."""

    def __init__(self, kvd: KvdAddress, *, total: int, seed: int, sample_every: int) -> None:
        """One in `sample_every` transfers has its bytes compared."""
        self.total = total
        self._random = random.Random(seed)
        self._sample_every = sample_every
        self.tally = Tally(total)
        self.control_ms: list[float] = []
        """From offer and accept, sent together, to LANDED, less the copy."""
        self.late_ms: list[float] = []
        """How much later than its fixed time each transfer of the open loop was started."""
        self.copy_ms: list[float] = []
        self.verified = 0
        self.wrong = 0
        """Of the verified ones, those whose bytes are not the source's."""
        layout = plain_layout(_POOL, _LAYERS, _BLOCK_BYTES)
        self._p = FakeEngine(kvd, layout=layout, seed=seed + 1, on_end=self._hears("p"))
        self._d = FakeEngine(kvd, layout=layout, seed=seed + 2, on_end=self._hears("d"))
        self._free = {side: deque(self._random.sample(range(_POOL), _POOL)) for side in "pd"}
        self._open: dict[int, _Open] = {}
        self._next = 0
        self._news = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Traffic":
        try:
            for engine in (self._p, self._d):
                await self._stack.enter_async_context(engine)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def at_rate(self, count: int, rate: float) -> None:
        """Starts `count` transfers at fixed times, `rate` a second, whatever became of the others.

        Raises:
            TimeoutError: kvd holds all blocks, and gives none back.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        for index in range(count):
            due = began + index / rate
            await asyncio.sleep(due - loop.time())
            await self._until(lambda: min(map(len, self._free.values())) >= BLOCKS)
            self.late_ms.append((loop.time() - due) * 1e3)
            self._start()

    async def in_flight(self, count: int, most: int) -> None:
        """Starts `count` transfers, as fast as `most` at a time allow, at most the engines' blocks.

        Raises:
            TimeoutError: one does not end.
        """
        for _ in range(count):
            await self._until(lambda: len(self._open) < min(most, _POOL // BLOCKS))
            self._start()

    async def settle(self) -> None:
        """Waits until every transfer that was started has been heard of by everybody.

        Raises:
            TimeoutError: one does not end; the tally says how many.
        """
        await self._until(lambda: not self._open)
        not_started = len(_EVERYBODY) * (self.total - self._next)
        with contextlib.suppress(TimeoutError):  # the schedulers have; the tally tells of the workers
            await self._until(lambda: self.tally.missing <= not_started, _WORKERS_S)

    async def _until(self, true: Callable[[], bool], timeout: float = _END_S) -> None:
        if true():
            return
        async with asyncio.timeout(timeout):
            while not true():
                self._news.clear()
                await self._news.wait()

    def _start(self) -> None:
        number, self._next = self._next, self._next + 1
        tid = self._random.randbytes(TRANSFER_ID_BYTES)
        source, target = (tuple(self._free[side].popleft() for _ in range(BLOCKS)) for side in "pd")
        sample = self._random.randrange(self._sample_every) == 0
        if sample:  # nothing that an earlier transfer left there passes for this one's bytes
            for block in target:
                for layer in range(_LAYERS):
                    self._d.memory[0].fill(layer, block, 0)
        offer = Offer(f"p{number}", tid, 0, source, 16 * BLOCKS, Mode.READ)
        accept = Accept(f"d{number}", tid, 0, target, 0, ticket=self._p.ticket(tid))
        self._open[number] = _Open(source, target, sample, time.monotonic_ns())
        if self._random.random() < 0.5:
            self._p.scheduler.send(offer)
            self._d.scheduler.send(accept)
        else:
            self._d.scheduler.send(accept)
            self._p.scheduler.send(offer)

    def _hears(self, side: str) -> Callable[[Participant, int, End], None]:
        def hear(kind: Participant, index: int, end: End) -> None:
            now = time.monotonic_ns()
            number = int(end.handle[1:])
            self.tally.hear((side, kind), number, end)
            if kind is Participant.SCHEDULER:
                self._scheduler_heard(side, number, end, now)
            self._news.set()

        return hear

    def _scheduler_heard(self, side: str, number: int, end: End, now: int) -> None:
        transfer = self._open.get(number)
        if transfer is None:
            return  # heard again: the tally has it
        if side == "d" and end.outcome is Outcome.LANDED:
            self.control_ms.append((now - transfer.sent_ns - end.facts.copy_ns) / 1e6)
            self.copy_ms.append(end.facts.copy_ns / 1e6)
            if transfer.sample:
                self.verified += 1
                self.wrong += self._p.memory[0].prompt(transfer.source) != self._d.memory[0].prompt(transfer.target)
        transfer.sides.discard(side)
        if not transfer.sides:
            self._free["p"].extend(transfer.source)
            self._free["d"].extend(transfer.target)
            del self._open[number]
