"""Two daemons with wires before them, an engine behind each, and the ordinary ways of a transfer between them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from pdserve.api.kvd.v1 import peer_pb2, peer_pb2_grpc
from pdserve.kvd.client import Accept, Begin, Offer
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import FakeEngine, RunningNode, running_node
from pdserve.kvd.types import Mode

SRC, DST = (3, 4, 9, 1), (8, 9, 10, 40)
WAIT_S = 15.0


def new_id() -> bytes:
    """As the proxy mints it."""
    return os.urandom(16)


async def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Waits for what has no event of its own.

    Raises:
        AssertionError: not within `seconds`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not so within {seconds} s"
        await asyncio.sleep(0.005)


class Stranger(peer_pb2_grpc.PeerServiceServicer):
    """Of a daemon that is made up, what a test does not care about."""

    async def Lend(self, request_iterator: object, context: object) -> AsyncIterator[peer_pb2.LendResponse]:
        """It lends nothing."""
        raise NotImplementedError
        yield peer_pb2.LendResponse()


@dataclass
class Pair:
    """`p` produces on node `a`, `d` consumes on node `b`."""

    a: RunningNode
    b: RunningNode
    p: FakeEngine
    d: FakeEngine

    def offer(self, tid: bytes, handle: str = "p", consumers: int = 1, mode: Mode = Mode.READ) -> None:
        """The producer holds its prompt."""
        self.p.scheduler.send(Offer(handle, tid, 0, SRC, 60, mode, consumers))

    def accept(self, tid: bytes, handle: str = "d", blocks: tuple[int, ...] = DST, **more: Any) -> None:
        """The consumer accepts, in READ."""
        first = len(DST) - len(blocks)
        message: dict[str, Any] = {"consumer": 0, "first_block": first, "ticket": self.p.ticket(tid)} | more
        self.d.scheduler.send(Accept(handle, tid, block_ids=blocks, **message))

    def accept_write(self, tid: bytes, handle: str = "d", blocks: tuple[int, ...] = DST) -> None:
        """The consumer accepts, in WRITE."""
        self.accept(tid, handle, blocks, ticket=b"", peer_locator=self.p.locator())

    def begin(self, tid: bytes, handle: str = "p") -> None:
        """The producer begins, in WRITE."""
        self.p.scheduler.send(Begin(handle, tid, Mode.WRITE))

    def compute(self, step: int, low: int, high: int, handle: str = "p") -> None:
        """The producer has computed these blocks of its prompt."""
        self.p.step(step, Chunk(handle, 0, low, SRC[low:high], high))

    def cut(self) -> None:
        """Breaks the link, both ways."""
        self.a.wire.cut()
        self.b.wire.cut()

    def mend(self) -> None:
        """The link is whole again."""
        self.a.wire.mend()
        self.b.wire.mend()

    @property
    def same(self) -> bool:
        """Whether the consumer's blocks hold what the producer's do."""
        return all(
            ours.prompt(SRC) == theirs.prompt(DST) for ours, theirs in zip(self.p.memory, self.d.memory, strict=True)
        )

    def landed(self, tid: bytes) -> int:
        """Bytes that the producer's daemon knows to be in place, of a transfer that is open."""
        transfer = self.a.kvd.node.transfers.book.transfers.get(tid)
        return sum(c.bytes_landed for c in transfer.consumers.values()) if transfer is not None else 0

    async def settled(self) -> None:
        """Nothing is held on either node any more."""
        await until(lambda: self.a.free and self.b.free)


@contextlib.asynccontextmanager
async def pair(
    *, ranks: int = 1, grace: float = 2.0, grace_there: float | None = None, **limits: Any
) -> AsyncIterator[Pair]:
    """Two nodes; nothing may be held on either at the end. `grace_there`: the producer's node's, where it differs."""
    async with (
        running_node(grace=grace if grace_there is None else grace_there, **limits) as a,
        running_node(grace=grace, **limits) as b,
        FakeEngine(a.kvd, ranks=ranks, seed=1) as p,
        FakeEngine(b.kvd, ranks=ranks, seed=2) as d,
    ):
        made = Pair(a, b, p, d)
        yield made
        await made.settled()
