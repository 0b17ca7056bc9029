"""Two daemons and what is lost between them: engines, daemons, the link. Both ends hear it, no block stays held, and
what was fetched from one that is lost is never taken.
"""

import asyncio
import contextlib

import pytest

from pdserve.kvd.client import AttachConfig, Cancel, Outcome
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.peers.link import LinkState
from pdserve.kvd.peers.messages import OpEnded, PostOp, Relayed, Told
from pdserve.kvd.testing import FakeEngine, RunningNode, Wire, running_node
from tests.contract.kvd.peers_rig import DST, Pair, new_id, pair, until

GRACE = 0.4


async def under_way(two: Pair, tid: bytes) -> None:
    """A transfer whose copy waits at the gate."""
    two.b.copies.shut()
    two.offer(tid)
    two.accept(tid)
    await two.b.copies.reached()


async def works(two: Pair) -> None:
    """The next transfer lands."""
    two.b.copies.open()
    tid = new_id()
    two.offer(tid, "next p")
    two.accept(tid, "next d")
    assert (await two.d.end_of("next d", 15.0)).outcome is Outcome.LANDED
    assert (await two.p.end_of("next p", 15.0)).outcome is Outcome.RELEASED
    assert two.same


async def test_the_producers_engine_dies_under_a_copy() -> None:
    """The consumer hears PEER_LOST once its copy has ended; its blocks come back; the dead engine's memory goes."""
    async with pair() as two:
        async with FakeEngine(two.a.kvd, seed=7) as dying:
            tid = new_id()
            other = Pair(two.a, two.b, dying, two.d)
            await under_way(other, tid)
        await until(lambda: tid in two.a.kvd.node.transfers.book.transfers)
        assert two.a.kvd.node.registry.get(dying.engine_id) is not None  # still read
        assert not any(two.d.heard.values())
        two.b.copies.open()
        end = await two.d.end_of("d")
        assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
        await until(lambda: two.a.kvd.node.registry.get(dying.engine_id) is None)
        await until(lambda: two.b.kvd.node.registry.get(dying.engine_id) is None)
        await works(two)


async def test_the_consumers_engine_dies_under_a_copy() -> None:
    """The producer hears PEER_LOST, after nothing is in flight any more; the dead engine's memory goes."""
    async with pair() as two:
        async with FakeEngine(two.b.kvd, seed=7) as dying:
            tid = new_id()
            await under_way(Pair(two.a, two.b, two.p, dying), tid)
        await until(lambda: bool(two.a.kvd.node.transfers.book.transfers[tid].consumers[0].fence))
        assert not any(two.p.heard.values())
        two.b.copies.open()
        end = await two.p.end_of("p")
        assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
        for node in (two.a, two.b):
            await until(lambda node=node: node.kvd.node.registry.get(dying.engine_id) is None)  # type: ignore[misc]
        await works(two)


@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_an_engine_without_a_stream_for_the_grace_is_lost_to_the_other_node_too(side: str) -> None:
    """Its memory stays, its transfers fail on both sides, and it may come back."""
    async with pair(grace=0.2) as two:
        tid = new_id()
        two.b.copies.open()
        two.begin(tid)
        two.accept_write(tid)
        await until(lambda: two.landed(tid) == 0 and len(two.b.kvd.node.transfers.relay) == 1)
        await until(lambda: len(two.a.kvd.node.transfers.book.transfers[tid].consumers) == 1)
        gone, stays, handle = (two.p, two.d, "d") if side == "producer" else (two.d, two.p, "p")
        await gone.workers[0].aclose()
        end = await stays.end_of(handle)
        assert end.reason == "PEER_LOST"
        await two.settled()


@pytest.mark.parametrize("how", ["cut", "held"])
async def test_a_link_that_is_down_for_less_than_the_grace_costs_nothing(how: str) -> None:
    """Everything that was said meanwhile arrives once, in order, over the next stream; nothing fails."""
    async with pair(grace=5.0) as two:
        tid = new_id()
        await under_way(two, tid)
        links = [node.kvd.node.desk.links for node in (two.a, two.b)]
        if how == "cut":
            two.cut()
            await until(lambda: all(link.state is LinkState.AWAY for each in links for link in each))
        else:
            two.a.wire.hold()
            two.b.wire.hold()
        two.b.copies.open()
        late = new_id()
        two.offer(late, "p2")
        two.accept(late, "d2", (50, 51, 52, 53))
        await asyncio.sleep(0.3)
        assert not any(two.d.heard.values())
        two.mend()
        two.a.wire.let()
        two.b.wire.let()
        for handle in ("d", "d2"):
            assert (await two.d.end_of(handle)).outcome is Outcome.LANDED
        for handle in ("p", "p2"):
            assert (await two.p.end_of(handle)).outcome is Outcome.RELEASED
        assert two.same
        assert [link.number for each in links for link in each] == [1, 1]


async def test_a_link_that_is_down_for_longer_fails_what_was_open_on_both_sides() -> None:
    """Both ends hear PEER_LOST after the grace, and a copy that hangs does not keep them: its session is closed.
    Afterwards the link works again."""
    async with pair(grace=GRACE) as two:
        tid = new_id()
        await under_way(two, tid)
        two.cut()
        for engine, handle in ((two.p, "p"), (two.d, "d")):
            end = await engine.end_of(handle)
            assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
        await two.settled()
        assert [len(node.kvd.node.desk.links) for node in (two.a, two.b)] == [0, 0]
        two.mend()
        await works(two)


async def test_late_bytes_of_freed_blocks_are_thrown_away() -> None:
    """The producer's node gives up first, and its blocks are overwritten while the consumer, cut off, still reads
    them. Its copy ends well, the link comes back: it never hears LANDED."""
    async with pair(grace=10.0, grace_there=0.2) as two:
        tid = new_id()
        await under_way(two, tid)
        two.cut()
        await two.p.end_of("p")
        for block in range(64):
            for layer in range(2):
                two.p.memory[0].fill(layer, block, 0xEE)
        before = two.d.memory[0].prompt(DST)
        two.b.copies.open()
        await until(lambda: two.d.memory[0].prompt(DST) != before)
        assert not any(two.d.heard.values())
        two.mend()
        end = await two.d.end_of("d")
        assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
        await works(two)


async def test_a_fence_that_hangs_is_torn_down_through_the_link() -> None:
    """The producer gives up, the copy on the other node does not end: its daemon has the session closed there."""
    async with pair(fence=0.3) as two:
        tid = new_id()
        await under_way(two, tid)
        two.a.kvd.node.transfers.cancel(tid, "CANCELLED", two.a.kvd.node.now())
        two.a.kvd.node._settle()
        assert (await two.d.end_of("d")).outcome is Outcome.CANCELLED
        assert (await two.p.end_of("p")).outcome is Outcome.CANCELLED
        assert two.a.kvd.node.transfers.book.fences.torn_down == 2  # one for each end


class Restartable:
    """A node that can die without a word and come back at the same address, with other engines."""

    def __init__(self, wire: Wire, grace: float) -> None:
        self._wire = wire
        self._grace = grace
        self._stack = contextlib.AsyncExitStack()
        self.node: RunningNode

    async def start(self) -> RunningNode:
        """A new daemon, at once reachable."""
        self._wire.mend()
        self.node = await self._stack.enter_async_context(running_node(grace=self._grace, wire=self._wire))
        return self.node

    async def die(self) -> None:
        """Its link is gone first, as with SIGKILL: no goodbye arrives."""
        self._wire.cut()
        self.node.copies.open()
        await self._stack.aclose()


@pytest.mark.parametrize("dies", ["producer's", "consumer's"])
async def test_a_daemon_dies_and_another_starts_at_its_address(dies: str) -> None:
    """What was open ends on the other node, long before the grace is over, since the new daemon is met; transfers
    with that one land."""
    grace = 60.0
    async with Wire() as wire, running_node(grace=grace) as stays:
        other = Restartable(wire, grace)
        mortal = await other.start()
        away = AttachConfig(reconnect_deadline=0.2)
        a, b = (mortal, stays) if dies == "producer's" else (stays, mortal)
        engines = contextlib.AsyncExitStack()
        p = await engines.enter_async_context(FakeEngine(a.kvd, seed=1, config=away))
        d = await engines.enter_async_context(FakeEngine(b.kvd, seed=2, config=away))
        two = Pair(a, b, p, d)
        await under_way(two, new_id())
        stays.wire.cut()
        await other.die()
        stays.wire.mend()
        alive, handle = (d, "d") if dies == "producer's" else (p, "p")
        fresh = await other.start()
        async with FakeEngine(fresh.kvd, seed=3) as new:
            pairing = Pair(fresh, stays, new, d) if dies == "producer's" else Pair(stays, fresh, p, new)
            end = await alive.end_of(handle)
            assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
            await works(pairing)
            await pairing.settled()
        await engines.aclose()
        await other.die()


async def test_a_peer_that_is_not_there_fails_what_waits_for_it() -> None:
    """The accept ends with PEER_LOST after the time to connect, and says what was tried."""
    async with (
        running_node(peer=PeerConfig(listen="127.0.0.1:0", connect=0.5)) as b,
        running_node() as a,
        FakeEngine(a.kvd, seed=1) as p,
        FakeEngine(b.kvd, seed=2) as d,
    ):
        a.wire.cut()
        two = Pair(a, b, p, d)
        two.accept(new_id())
        end = await d.end_of("d")
        assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
        assert "not reached within 0.5 s" in end.detail
        assert b.free


async def test_a_message_that_is_missing_breaks_the_link() -> None:
    """A row with a hole is noticed, and never gone on with: what was open fails, and the next transfer lands."""
    async with pair(grace=GRACE) as two:
        tid = new_id()
        await under_way(two, tid)
        (link,) = two.a.kvd.node.desk.links
        link._next += 1  # a message that is counted, and never sent
        two.p.scheduler.send(Cancel(tid, "CANCELLED"))
        for engine, handle in ((two.d, "d"), (two.p, "p")):
            assert not (await engine.end_of(handle)).outcome.good
        await works(two)


@pytest.mark.parametrize("kind", [Relayed, PostOp, OpEnded, Told])
async def test_a_word_that_a_defect_loses_does_not_hold_blocks_for_ever(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message of each kind is dropped before it is numbered: a deadline or a repetition ends the transfer."""
    async with pair(lease=0.5, transfer=1.0, park=0.6, accept=0.6, fence=0.3) as two:
        links = [node.kvd.node.desk.links for node in (two.a, two.b)]
        dropped: list[object] = []
        for each in links:
            send = each.send

            def lossy(link, message, now, send=send):  # type: ignore[no-untyped-def]
                if isinstance(message, kind) and not dropped:
                    dropped.append(message)
                else:
                    send(link, message, now)

            monkeypatch.setattr(each, "send", lossy)
        tid = new_id()
        two.accept(tid)
        two.offer(tid)
        await two.d.scheduler_end_of("d")  # a worker may hear it again: what the schedulers say again is answered again
        await two.p.scheduler_end_of("p")
        assert len(dropped) == 1
        await two.settled()


async def test_blocks_that_were_not_accepted_are_never_written() -> None:
    """A peer that posts to blocks outside the handle's lease, or for another engine's prompt, is refused."""
    async with pair() as two:
        tid = new_id()
        two.accept(tid)
        await until(lambda: tid in two.a.kvd.node.transfers.book.transfers)
        node = two.b.kvd.node
        (link,) = node.desk.links
        before = two.d.memory[0].prompt(range(64))
        for source, blocks in ((two.p.engine_id, (1, 2, 3, 4)), ("another", DST)):
            post = PostOp(99, tid, source, two.d.engine_id, "d", 0, (0, 1), (0, 1, 2, 3), blocks)
            refused = node.transfers.relay.post(link, post)
            assert refused is not None
            assert refused.error
        node._settle()
        two.offer(tid)
        assert (await two.d.end_of("d")).outcome is Outcome.LANDED
        after = two.d.memory[0].prompt(range(64))
        changed = {i % 64 for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y}
        assert changed == set(DST)
