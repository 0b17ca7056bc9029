"""Two daemons that hand over through mori, on the fake of its library: daemons, link, processes and bytes are real."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import pytest

from pdserve.kvd.client import Outcome
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.testing import FakeEngine, RunningKvd, running_kvd
from pdserve.kvd.testing.mori import to_env
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library, MoriProcess
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from tests.contract.kvd.mori_suite import FAST
from tests.contract.kvd.peers_rig import until
from tests.contract.kvd.test_kvd_peers_cards import Lives, Ways


@pytest.fixture
async def two(forked: Library) -> AsyncIterator[Ways]:
    """Two nodes that have handed over before; `b` is the consumer's."""

    def transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
        """As `--transport mori` has them."""
        return (ShmTransport(arena), MoriTransport(arena, FAST, forked, to_env()))

    peer = PeerConfig(listen="127.0.0.1:0")
    async with (
        running_kvd(transports=transports, peer=peer) as a,
        running_kvd(transports=transports, peer=peer) as b,
        FakeEngine(a, ranks=2, seed=1) as p,
        FakeEngine(b, ranks=2, seed=2) as d,
    ):
        made = Ways(Lives(), a, b, p, d)
        assert await made.transfer("first") is Outcome.LANDED
        assert made.same
        yield made


def process(node: RunningKvd) -> MoriProcess:
    """The one mori process of a node: a producer's serves, a consumer's reads."""
    _, transport = node.node.transports
    assert isinstance(transport, MoriTransport)
    (found,) = transport.processes()
    return found


async def test_a_node_that_only_serves_or_only_reads_has_one_process_which_sleeps_between(two: Ways) -> None:
    """The next transfer wakes the one that reads, and lands; the one that is read sleeps on."""
    serving, reading = process(two.a), process(two.b)
    await until(lambda: serving.asleep and reading.asleep)
    assert await two.transfer("next") is Outcome.LANDED
    assert two.same
    assert serving.asleep
    assert (process(two.a), process(two.b)) == (serving, reading)


async def test_a_mori_process_that_dies_costs_no_more_than_what_was_read_through_it(two: Ways) -> None:
    """The reading one dies while nothing is read: no transfer does. The serving one dies: one transfer fails, once its
    silence has been noticed, and the next one lands by another card."""
    reading = process(two.b)
    os.kill(reading.pid, signal.SIGKILL)
    await until(lambda: not reading.running)
    assert await two.transfer("next") is Outcome.LANDED
    serving = process(two.a)
    os.kill(serving.pid, signal.SIGKILL)
    await until(lambda: not serving.running)
    assert await asyncio.wait_for(two.transfer("lost"), 20) is Outcome.FAILED
    assert await asyncio.wait_for(two.transfer("last"), 20) is Outcome.LANDED
    assert two.same
