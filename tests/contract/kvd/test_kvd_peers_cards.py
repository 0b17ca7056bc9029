"""Two daemons whose way between their memories comes to an end while they live: the next transfers find another.

Fake is the half of the transport that may die: a number, where nixl has processes. Daemons, link and memory are real,
and in the last test nixl is.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from pdserve.kvd.client import Accept, Offer, Outcome
from pdserve.kvd.config import KvdConfig, NixlConfig
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.plan import Runs
from pdserve.kvd.testing import FakeEngine, RunningKvd, running_kvd
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion, Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.transport.sim import SimCopy, SimSession, SimTransport
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import TransferFailed
from tests.contract.kvd.peers_rig import DST, SRC, new_id, until


@dataclass(eq=False)
class Lives:
    """What serves on one side, and what reads on the other: each is the next one once the last has died."""

    serving: int = 0
    reading: int = 0
    reached: list[int] = field(default_factory=list)
    """Those that served when sessions were opened."""
    makes: asyncio.Event = field(default_factory=asyncio.Event)
    """Cards are made while this is set."""


class MortalTransport(SimTransport):
    """sim, whose cards are good for one life of the serving side, and its sessions for one of each."""

    def __init__(self, arena: Arena, lives: Lives) -> None:
        super().__init__(arena, 1e9)
        self._lives = lives

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        await self._lives.makes.wait()
        return bytes([self._lives.serving]) + await super().card(region)

    async def reach(  # type: ignore[override]  # a session around sim's
        self, src: RemoteRegion, dst: MappedRegion
    ) -> "MortalSession":
        """See port.Reaching."""
        life = src.card[0]
        inner = await super().reach(RemoteRegion(src.key, src.kind, src.size, src.card[1:]), dst)
        self._lives.reached.append(life)
        return MortalSession(inner, self._lives, life)


class MortalSession:
    """See port.FarSession. As with nixl, a card of a life that is over is noticed by the first copy."""

    def __init__(self, inner: SimSession, lives: Lives, life: int) -> None:
        self._inner = inner
        self._lives = lives
        self._life = life
        self._reading = lives.reading
        self._failed = False

    @property
    def over(self) -> bool:
        """See port.FarSession."""
        return self._failed or self._reading != self._lives.reading

    def start(self, runs: Runs) -> SimCopy:
        """See port.Session."""
        self._failed = self._failed or self._life != self._lives.serving
        if self.over:
            raise TransferFailed("the process is gone")
        return self._inner.start(runs)

    async def close(self) -> None:
        """See port.Session."""
        await self._inner.close()


@dataclass
class Ways:
    """`p` produces on one node, `d` consumes on the other."""

    lives: Lives
    a: RunningKvd
    b: RunningKvd
    p: FakeEngine
    d: FakeEngine

    async def transfer(self, name: str) -> Outcome:
        """One transfer, to its end on both sides."""
        tid = new_id()
        self.p.scheduler.send(Offer(f"p {name}", tid, 0, SRC, 60, Mode.READ, 1))
        self.d.scheduler.send(
            Accept(f"d {name}", tid, consumer=0, first_block=0, block_ids=DST, ticket=self.p.ticket(tid))
        )
        await self.p.end_of(f"p {name}")
        return (await self.d.end_of(f"d {name}")).outcome

    @property
    def same(self) -> bool:
        """Whether the consumer's blocks hold what the producer's do."""
        return all(a.prompt(SRC) == b.prompt(DST) for a, b in zip(self.p.memory, self.d.memory, strict=True))


@contextlib.asynccontextmanager
async def ways(ranks: int = 1, *, nixl: bool = False) -> AsyncIterator[Ways]:
    """Two nodes that have handed over before; `b` is the consumer's."""
    lives = Lives()
    lives.makes.set()

    def transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
        if nixl:
            return (ShmTransport(arena), NixlTransport(arena, NixlConfig(tls="tcp", stall=2.0)))
        return (MortalTransport(arena, lives),)

    peer = PeerConfig(listen="127.0.0.1:0")
    async with (
        running_kvd(transports=transports, peer=peer) as a,
        running_kvd(transports=transports, peer=peer) as b,
        FakeEngine(a, ranks=ranks, seed=1) as p,
        FakeEngine(b, ranks=ranks, seed=2) as d,
    ):
        made = Ways(lives, a, b, p, d)
        assert await made.transfer("first") is Outcome.LANDED
        yield made


@pytest.mark.parametrize("ranks", [1, 2])
async def test_after_the_serving_sides_end_one_transfer_fails_and_the_next_lands(ranks: int) -> None:
    """Each time: the failure brings another card of every rank, and nothing is read by the old one any more."""
    async with ways(ranks) as two:
        for life in (1, 2, 3):
            two.lives.serving = life
            assert await two.transfer(f"lost {life}") is Outcome.FAILED
            assert await two.transfer(f"next {life}") is Outcome.LANDED
            assert two.same
        assert two.lives.reached == sorted(life for life in range(4) for _ in range(ranks))


async def test_the_reading_sides_end_while_nothing_is_read_costs_nothing() -> None:
    """Its sessions are found to be over before a copy is begun, and the card is as good as it was."""
    async with ways() as two:
        two.lives.reading += 1
        assert await two.transfer("next") is Outcome.LANDED
        assert two.same
        assert two.lives.reached == [0, 0]


async def test_a_transfer_that_comes_before_the_next_card_waits_for_it() -> None:
    """It is not tried with the card that led nowhere."""
    async with ways() as two:
        two.lives.serving = 1
        two.lives.makes.clear()
        assert await two.transfer("lost") is Outcome.FAILED
        going_on = asyncio.create_task(two.transfer("next"))
        await until(lambda: any(end.ops for end in two.b.node.transfers.relay))
        await asyncio.wait([going_on], timeout=0.05)
        assert not going_on.done()
        two.lives.makes.set()
        assert await going_on is Outcome.LANDED
        assert two.lives.reached == [0, 1]


async def kill(node: RunningKvd) -> None:
    """Kills the nixl process of a node, and waits until the node has noticed."""
    _, transport = node.node.transports
    assert isinstance(transport, NixlTransport)
    (process,) = transport.processes()
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not transport.processes())


async def test_a_nixl_process_that_dies_costs_no_more_than_what_was_read_through_it() -> None:
    """The serving process dies: one transfer fails. The reading one dies while nothing is read: none does."""
    async with ways(nixl=True) as two:
        await kill(two.a)
        assert await two.transfer("lost") is Outcome.FAILED
        assert await two.transfer("next") is Outcome.LANDED
        await kill(two.b)
        assert await two.transfer("last") is Outcome.LANDED
        assert two.same
