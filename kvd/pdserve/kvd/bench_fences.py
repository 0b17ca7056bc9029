"""Cancels transfers while their bytes are under way, and times how long kvd takes to let go of them."""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Final

from pdserve.kvd.bench_daemon import Books, books
from pdserve.kvd.client import Accept, Cancel, Offer, Outcome
from pdserve.kvd.testing import FakeEngine, KvdAddress, plain_layout
from pdserve.kvd.types import TRANSFER_ID_BYTES, Mode

_BLOCKS: Final = 256
_BLOCK_BYTES: Final = 512 << 10
"""128 MiB a transfer: some 10 ms of copying, in which a cancel has to arrive."""
_TRIES: Final = 10
"""Transfers for each that is to be cancelled in time, at most."""
_END_S: Final = 30.0
_LOOK_S: Final = 0.001


class Broken(Exception):
    """Nothing was measured: transfers failed, or had landed before they could be cancelled."""


@dataclass(frozen=True, slots=True)
class Fences:
    """What came of it."""

    ms: list[float]
    """From each cancel, sent when the first bytes had arrived, to the producer's end: its blocks are
    its own again."""
    too_late: int
    """Transfers that landed all the same."""
    seen: Books
    """kvd's own count, with both engines still there."""


async def fences(kvd: KvdAddress, count: int, seed: int) -> Fences:
    """Cancels `count` transfers in time.

    Raises:
        Broken: a transfer failed, or most had landed before.
        TimeoutError: an end did not come.
    """
    rng = random.Random(f"fences {seed}")  # another stream of ids than the loops have
    layout = plain_layout(_BLOCKS, layers=1, block_bytes=_BLOCK_BYTES)
    took: list[float] = []
    async with FakeEngine(kvd, layout=layout, seed=seed + 3) as p, FakeEngine(kvd, layout=layout, seed=seed + 4) as d:
        for number in range(count * _TRIES):
            ms = await _cancelled(p, d, number, rng)
            if ms is not None:
                took.append(ms)
            if len(took) == count:
                return Fences(took, number + 1 - count, await books(kvd.socket))
    raise Broken(f"{len(took)} of {count * _TRIES} transfers were cancelled before they landed")


async def _cancelled(p: FakeEngine, d: FakeEngine, number: int, rng: random.Random) -> float | None:
    """One transfer; None where it was too late."""
    tid = rng.randbytes(TRANSFER_ID_BYTES)
    target = tuple(rng.sample(range(_BLOCKS), _BLOCKS))
    first = p.memory[0].block(0, 0)[0]
    d.memory[0].fill(0, target[0], first ^ 0xFF)
    d.scheduler.send(Accept(f"d{number}", tid, 0, target, 0, ticket=p.ticket(tid)))
    p.scheduler.send(Offer(f"p{number}", tid, 0, tuple(range(_BLOCKS)), 16 * _BLOCKS, Mode.READ))
    ended = asyncio.create_task(p.scheduler_end_of(f"p{number}", _END_S))
    while d.memory[0].block(0, target[0])[0] != first and not ended.done():  # noqa: ASYNC110  # memory has no event
        await asyncio.sleep(_LOOK_S)
    began = time.perf_counter()
    p.scheduler.send(Cancel(tid, "CANCELLED"))
    end = await ended
    took = (time.perf_counter() - began) * 1e3
    await d.end_of(f"d{number}", _END_S)
    if end.outcome not in (Outcome.CANCELLED, Outcome.RELEASED):
        raise Broken(f"transfer {number} ended {end.outcome.value}: {end.reason} {end.detail}")
    return took if end.outcome is Outcome.CANCELLED else None
