"""mori in ranks' processes, on the fake of its library: what becomes of copies, of memory and of ranks when one of the
three sides ends, or does not let go. What both placements promise is in test_kvd_mori and its table.

Ranks are real processes, and so are the bytes.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.kvd.testing.mori import Machine, to_env
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_hosted import MoriHosted
from pdserve.kvd.transport.mori_process import Library, MoriProcess
from pdserve.kvd.transport.port import RemoteRegion
from pdserve.kvd.transport.rank_host import TakesHosts
from pdserve.rpc.errors import TransferFailed
from tests.contract.kvd.far_rig import Nodes, count, lives, paint, region, some, until
from tests.contract.kvd.mori_suite import FAST, SIZE, Bench, bound_to, whole

SLOW = Machine(rate=SIZE / 0.4)


@pytest.fixture
def bench(tmp_path: Path, forked: Library) -> Bench:
    """The whole fake, in ranks."""
    return Bench(tmp_path, forked, hosted=True)


@pytest.fixture
async def nodes(bench: Bench) -> AsyncIterator[Nodes[MoriTransport]]:
    """The consumer's device takes 0.4 s for all of a region."""
    async with bench.nodes(consumer=SLOW) as made:
        yield made


def reads(nodes: Nodes[MoriTransport]) -> MoriProcess:
    """The engine that reads."""
    (found,) = nodes.consumer.processes()
    return found


async def test_a_rank_that_dies_fails_its_copies_and_leaves_kvd(nodes: Nodes[MoriTransport]) -> None:
    """As by mori's abort: the copy fails once the process is gone, and so does what is asked of it later."""
    assert isinstance(nodes.consumer, TakesHosts)
    session = await nodes.reach()
    copy = session.start(whole())
    await nodes.under_way()
    reading = reads(nodes)
    os.kill(reading.pid, signal.SIGABRT)
    with pytest.raises(TransferFailed, match="that it was in has ended"):
        await asyncio.wait_for(copy.wait(), 5)
    assert not lives(reading.pid)
    assert await nodes.still()
    assert session.over
    await session.close()
    with pytest.raises(TransferFailed, match="takes no orders"):
        await nodes.reads(await nodes.described())


async def test_a_kvd_that_is_gone_leaves_nothing_that_writes(nodes: Nodes[MoriTransport]) -> None:
    """The rank notices its end, takes mori down and goes on; nothing of it is left there."""
    session = await nodes.reach()
    copy = session.start(whole())
    await nodes.under_way()
    reading = reads(nodes)
    reading._writer.transport.abort()  # what the kernel does with a process that is killed
    await until(lambda: not bound_to(reading.pid))
    paint(nodes.arena, nodes.dst, 0)
    assert await nodes.still()
    assert count(nodes.arena, nodes.dst, 7) == 0
    assert lives(reading.pid)
    os.kill(reading.pid, signal.SIGKILL)  # this kvd is there still, and waits for a word or for that
    with pytest.raises(TransferFailed):
        await copy.wait()
    await session.close()


async def test_a_failure_of_one_peer_lets_the_copies_from_another_end(
    nodes: Nodes[MoriTransport], forked: Library
) -> None:
    """The engine ends for the one, after the other's bytes are in place; the rank goes on, and new sessions have
    another engine there."""
    third = MoriTransport(nodes.arena, FAST, forked, to_env())
    src = region(nodes.arena, "p2", 9, SIZE)
    described = RemoteRegion(src.key, src.kind, src.size, await third.card(src))
    other = await nodes.consumer.reach(described, nodes.dst)
    session = await nodes.reach()
    reading = reads(nodes)
    going_on = other.start(whole())
    await nodes.producer.forget(nodes.src)
    failing = session.start(some())
    with pytest.raises(TransferFailed, match="remote access error"):
        await asyncio.wait_for(failing.wait(), 5)
    assert (await going_on.wait()).nbytes == SIZE
    assert count(nodes.arena, nodes.dst, 9) == SIZE
    await session.close()
    await other.close()
    assert (await nodes.reads(await nodes.described())).nbytes == 4096
    assert lives(reading.pid)
    await third.aclose()


async def test_the_last_session_ends_the_engine_and_not_the_rank(nodes: Nodes[MoriTransport]) -> None:
    """A core is used while there are sessions, or cards; afterwards the rank has only its own threads."""
    session = await nodes.reach()
    reading = reads(nodes)
    assert bound_to(reading.pid)
    await session.close()
    assert not bound_to(reading.pid)
    (serving,) = nodes.producer.processes()
    await nodes.producer.give_back(nodes.src)
    assert nodes.producer.processes() == []
    assert not bound_to(serving.pid)
    assert lives(serving.pid)


async def test_a_rank_that_answers_nothing_is_ended_and_only_then_its_copies(
    nodes: Nodes[MoriTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, so that it cannot let go: until it is dead the copy is not terminal."""
    monkeypatch.setattr(MoriHosted, "let_go", 0.5)
    session = await nodes.reach()
    copy = session.start(whole())
    await nodes.under_way()
    reading = reads(nodes)
    os.kill(reading.pid, signal.SIGSTOP)
    closing = asyncio.create_task(session.close())
    await asyncio.wait({closing, asyncio.ensure_future(copy.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not lives(reading.pid)
    with pytest.raises(TransferFailed):
        await copy.wait()
    await asyncio.wait_for(closing, 5)


async def test_sockets_that_are_closed_without_a_word_prove_nothing(
    nodes: Nodes[MoriTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends closes them in no known order, and what writes may be open still: the copy is terminal once
    the process is dead, here by kvd's hand."""
    monkeypatch.setattr(MoriHosted, "let_go", 0.5)
    session = await nodes.reach()
    copy = session.start(whole())
    await nodes.under_way()
    reading = reads(nodes)
    reading._writer.get_extra_info("socket").shutdown(socket.SHUT_RD)  # as kvd sees it; the rank lives
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(copy.wait(), 10)
    assert not lives(reading.pid)
    await asyncio.wait_for(session.close(), 5)


async def test_a_library_that_does_not_let_go_costs_the_rank(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend is still there, so the copy is not terminal, whatever the rank says, until the rank's process is."""
    silent = bench.file("silent")
    monkeypatch.setattr(MoriHosted, "let_go", 0.5)
    keeps = replace(bench, hosts="tests.contract.kvd.mori_keeps")
    machine = Machine(rate=SIZE / 0.4, silent=str(silent))
    async with keeps.nodes(consumer=machine, config=replace(FAST, stall=600.0)) as nodes:
        session = await nodes.reach()
        copy = session.start(whole())
        await nodes.under_way()
        reading = reads(nodes)
        silent.touch()
        closing = asyncio.create_task(session.close())
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(copy.wait(), 10)
        assert not lives(reading.pid)
        await closing
