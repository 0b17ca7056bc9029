"""Transfers between two daemons on loopback: every byte, both modes, every way to give one up.

Real: the daemons, the stream between them, Unix sockets, memfds. Simulated: the engines, and the link that the bytes
take (which reads the other daemon's memory).
"""

import asyncio

import pytest

from pdserve.kvd.client import Accept, Begin, Cancel, Offer, Outcome, Renew, Retract
from pdserve.kvd.notices import Chunk
from pdserve.kvd.peers.link import LinkState
from pdserve.kvd.testing import FakeEngine, Fault, plain_layout
from pdserve.kvd.types import Mode
from tests.contract.kvd.peers_rig import DST, SRC, new_id, pair, until


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("offer_first", [True, False])
async def test_read_moves_exactly_these_blocks(ranks: int, offer_first: bool) -> None:
    """READ: every rank's bytes arrive, no other block changes, both ends hear it once on all participants."""
    async with pair(ranks=ranks) as two:
        others = [b for b in range(64) if b not in DST]
        before, tid = [m.prompt(others) for m in two.d.memory], new_id()
        for step in (two.offer, two.accept) if offer_first else (two.accept, two.offer):
            step(tid)
            await asyncio.sleep(0.02)
        landed, released = await two.d.end_of("d"), await two.p.end_of("p")
        assert (landed.outcome, released.outcome) == (Outcome.LANDED, Outcome.RELEASED)
        assert two.same
        assert [m.prompt(others) for m in two.d.memory] == before
        facts = landed.facts
        assert (facts.kv_bytes, facts.ranks, facts.layers, facts.transport) == (4096 * 4 * 2 * ranks, ranks, 2, "sim")
        assert facts == released.facts  # one boot id: stamps need no offset


async def test_one_stream_serves_both_directions() -> None:
    """Both nodes produce and consume at once, and call each other at the same time: one stream stands."""
    async with pair() as two:
        for turn in range(10):
            tid, back = new_id(), new_id()
            two.offer(tid, f"p{turn}")
            two.accept(tid, f"d{turn}")
            two.d.scheduler.send(Offer(f"bp{turn}", back, 0, (20, 21), 30, Mode.READ))
            two.p.scheduler.send(Accept(f"bd{turn}", back, 0, (30, 31), 0, ticket=two.d.ticket(back)))
            for engine, handle in ((two.d, f"d{turn}"), (two.p, f"bd{turn}")):
                assert (await engine.end_of(handle)).outcome is Outcome.LANDED
            assert two.same
            assert two.d.memory[0].prompt((20, 21)) == two.p.memory[0].prompt((30, 31))
        assert [len(node.kvd.node.desk.links) for node in (two.a, two.b)] == [1, 1]
        (link,) = two.a.kvd.node.desk.links
        assert (link.state, link.number) == (LinkState.OPEN, 1)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_write_moves_layers_while_the_prompt_is_computed(ranks: int) -> None:
    """WRITE: bytes land before the offer; a prefix hit is skipped and never overwritten."""
    async with pair(ranks=ranks) as two:
        tid, prefix = new_id(), two.d.memory[0].prompt(DST[:1])
        two.accept_write(tid, blocks=DST[1:])
        two.begin(tid)
        two.compute(1, 0, 3)
        want = ranks * 4096 * 2 * 2
        await until(lambda: two.landed(tid) == want)
        two.offer(tid, mode=Mode.WRITE)
        landed, released = await two.d.end_of("d"), await two.p.end_of("p")
        assert (landed.outcome, released.outcome) == (Outcome.LANDED, Outcome.RELEASED)
        assert two.p.memory[0].prompt(SRC[1:]) == two.d.memory[0].prompt(DST[1:])
        assert two.d.memory[0].prompt(DST[:1]) == prefix
        assert landed.facts.overlapped_bytes == want


async def test_n_consumers_on_both_nodes() -> None:
    """Three consumers, one beside the producer and two elsewhere: the producer is released after the last."""
    async with pair() as two, FakeEngine(two.a.kvd, seed=3) as beside:
        tid = new_id()
        two.offer(tid, consumers=3)
        beside.scheduler.send(Accept("b", tid, 0, DST, 0, ticket=two.p.ticket(tid)))
        two.accept(tid, "d1", consumer=1)
        assert (await two.d.end_of("d1")).outcome is Outcome.LANDED
        assert (await beside.end_of("b")).outcome is Outcome.LANDED
        assert two.a.kvd.node.transfers.open
        two.accept(tid, "d2", (50, 51, 52, 53), consumer=2)
        assert (await two.d.end_of("d2")).outcome is Outcome.LANDED
        assert (await two.p.end_of("p")).outcome is Outcome.RELEASED
        assert two.d.memory[0].prompt((50, 51, 52, 53)) == two.p.memory[0].prompt(SRC)


async def test_a_prompt_that_the_consumer_has_whole_lands_at_once() -> None:
    """No blocks are wanted: LANDED without a copy."""
    async with pair() as two:
        tid = new_id()
        two.accept(tid, blocks=())
        assert (await two.d.end_of("d")).outcome is Outcome.LANDED
        two.offer(tid)
        assert (await two.p.end_of("p")).outcome is Outcome.RELEASED


@pytest.mark.parametrize("who", ["consumer", "producer", "cancel here", "cancel there"])
async def test_a_transfer_is_given_up_from_either_side_under_a_copy(who: str) -> None:
    """Both ends hear it, and only after the copy in flight has ended; the next transfer uses the same blocks."""
    async with pair() as two:
        two.b.copies.shut()
        tid = new_id()
        two.offer(tid)
        two.accept(tid)
        await two.b.copies.reached()
        match who:
            case "consumer":
                two.d.scheduler.send(Retract("d", 0, final=True, reason="CANCELLED"))
            case "producer":
                two.p.scheduler.send(Retract("p", 0, final=True, reason="CANCELLED"))
            case "cancel here":
                two.d.scheduler.send(Cancel(tid, "CANCELLED"))
            case "cancel there":
                two.p.scheduler.send(Cancel(tid, "CANCELLED"))
        await until(lambda: bool(two.a.kvd.node.transfers.book.transfers[tid].consumers[0].fence))
        assert len(two.a.kvd.node.leases) == 2
        assert len(two.b.kvd.node.leases) == 1
        assert not any(two.d.heard.values())
        two.b.copies.open()
        ends = [await two.d.end_of("d"), await two.p.end_of("p")]
        assert all(not end.outcome.good for end in ends)
        again = new_id()
        two.offer(again, "p2")
        two.accept(again, "d2")
        assert (await two.d.end_of("d2")).outcome is Outcome.LANDED
        assert two.same


async def test_a_cancel_before_the_accept_is_remembered_by_both() -> None:
    """Decode gives up what it has not accepted yet: its accept, should it come, is refused, and the producer hears."""
    async with pair() as two:
        warm = new_id()
        two.offer(warm, "w")
        two.accept(warm, "dw")
        await two.d.end_of("dw")
        tid = new_id()
        two.offer(tid)
        await until(lambda: tid in two.a.kvd.node.transfers.book.transfers)
        two.d.scheduler.send(Cancel(tid, "CANCELLED"))
        assert (await two.p.end_of("p")).outcome is Outcome.CANCELLED
        two.accept(tid)
        assert (await two.d.end_of("d")).outcome is Outcome.CANCELLED


async def test_renewals_of_both_sides_keep_what_waits() -> None:
    """The producer's lease lives by its service; the wait for an accept by the consumer's service, over the link."""
    async with pair(lease=0.4, accept=0.4, park=0.4, transfer=30.0) as two:
        warm = new_id()
        two.offer(warm, "w")
        two.accept(warm, "dw")
        await two.d.end_of("dw")
        tid = new_id()
        two.offer(tid)
        for _ in range(8):
            await asyncio.sleep(0.15)
            two.p.scheduler.send(Renew((tid,)))
            two.d.scheduler.send(Renew((tid,)))
        two.accept(tid)
        assert (await two.d.end_of("d")).outcome is Outcome.LANDED
        late = new_id()
        two.offer(late, "late")  # nobody renews: it runs out
        assert (await two.p.end_of("late")).outcome is Outcome.EXPIRED


async def test_a_preempted_producer_starts_again() -> None:
    """Blocks of the lost attempt are fenced over the link before they may be overwritten; the next attempt lands."""
    async with pair() as two:
        tid = new_id()
        two.b.copies.shut()
        two.accept_write(tid)
        two.begin(tid)
        two.compute(1, 0, 2)
        await two.b.copies.reached()
        two.p.scheduler.send(Retract("p", 0, final=False, reason="PREEMPTED"))
        fence = asyncio.create_task(two.p.workers[0].wait_fenced("p", 0, 10.0))
        await until(lambda: bool(two.a.kvd.node.transfers.book.transfers[tid].producer.fence))  # type: ignore[union-attr]
        assert not fence.done()
        two.b.copies.open()
        assert await fence
        for block in SRC:
            two.p.memory[0].fill(0, block, 7)
        two.p.step(2, Chunk("p", 1, 0, SRC, 4))
        two.p.scheduler.send(Offer("p", tid, 1, SRC, 60, Mode.WRITE))
        assert (await two.d.end_of("d")).outcome is Outcome.LANDED
        assert two.same


async def test_layouts_that_cannot_be_copied_are_refused_while_prefill_computes() -> None:
    """The consumer's layout has come with its accept: WRITE fails by name before a block is computed."""
    async with pair() as two, FakeEngine(two.b.kvd, seed=4, layout=plain_layout(64, layers=3)) as other:
        tid = new_id()
        two.begin(tid)
        other.scheduler.send(Accept("o", tid, 0, DST, 0, peer_locator=two.p.locator()))
        end = await other.end_of("o")
        assert (end.outcome, end.reason) == (Outcome.FAILED, "INCOMPATIBLE_ENGINES")
        assert "2 != 3" in end.detail
        assert (await two.p.end_of("p")).reason == "CONSUMER_FAILED"


async def test_engines_that_may_not_exchange_kv_are_refused() -> None:
    """Identities are compared by the producer's daemon, which has both."""
    async with pair() as two, FakeEngine(two.b.kvd, seed=4, identity={"model": "another"}) as other:
        tid = new_id()
        two.offer(tid)
        other.scheduler.send(Accept("o", tid, 0, DST, 0, ticket=two.p.ticket(tid)))
        assert (await other.end_of("o")).reason == "INCOMPATIBLE_ENGINES"
        await two.p.end_of("p")


@pytest.mark.parametrize("twice", ["handle", "consumer", "block"])
async def test_what_was_taken_is_not_taken_twice(twice: str) -> None:
    """The same accept again is passed over; another consumer's place, and a block that is being filled, are refused."""
    async with pair() as two:
        tid = new_id()
        two.accept(tid)
        await until(lambda: len(two.b.kvd.node.transfers.relay) == 1)
        if twice == "handle":
            two.accept(tid)
        elif twice == "consumer":
            two.accept(tid, "d2", (50, 51, 52, 53))
            assert (await two.d.end_of("d2")).reason == "TRANSFER_USED"
        else:
            two.accept(new_id(), "d2")
            assert (await two.d.end_of("d2")).reason == "INVALID_REQUEST"
        two.offer(tid)
        assert (await two.d.end_of("d")).outcome is Outcome.LANDED
        assert two.same


async def test_an_engine_that_is_not_there_is_a_stale_epoch() -> None:
    """A ticket of an engine that has ended is refused by its daemon, at once."""
    async with pair() as two:
        async with FakeEngine(two.a.kvd, seed=9) as gone:
            tid = new_id()
            ticket = gone.ticket(tid)
        await until(lambda: two.a.kvd.node.registry.get(gone.engine_id) is None)
        two.accept(tid, ticket=ticket)
        assert (await two.d.end_of("d")).reason == "STALE_EPOCH"


async def test_a_ticket_under_another_key_is_refused_before_anything_is_sent() -> None:
    """The consumer's own daemon reads the ticket first."""
    async with pair() as two:
        tid = new_id()
        two.accept(tid, ticket=two.p.ticket(tid, key=b"another key of a cluster"))
        assert (await two.d.end_of("d")).reason == "TICKET_FORGED"
        assert not two.a.wire.calls


@pytest.mark.parametrize(
    ("fault", "lands"), [(Fault.COPY_NOTHING, True), (Fault.WRONG_BLOCK, True), (Fault.FAIL, False)]
)
async def test_the_bytes_are_really_compared_here(fault: Fault, lands: bool) -> None:
    """A link that copies nothing, or the wrong block, does not pass for one that copies; a copy that fails fails."""
    async with pair() as two:
        two.b.faults.script.append(fault)
        tid = new_id()
        two.offer(tid)
        two.accept(tid)
        end = await two.d.end_of("d")
        assert (end.outcome is Outcome.LANDED) == lands
        assert not two.same
        await two.p.end_of("p")


async def test_many_transfers_at_once() -> None:
    """Sixty of both modes over one link: every byte is right, and nothing is left."""
    async with pair() as two:
        layout = plain_layout(400)
        async with FakeEngine(two.a.kvd, seed=5, layout=layout) as p, FakeEngine(two.b.kvd, seed=6, layout=layout) as d:
            tids = [new_id() for _ in range(60)]
            for n, tid in enumerate(tids):
                mine = tuple(range(4 * n, 4 * n + 4))
                theirs = tuple(reversed(mine))
                if n % 2:
                    p.scheduler.send(Offer(f"p{n}", tid, 0, mine, 60, Mode.READ))
                    d.scheduler.send(Accept(f"d{n}", tid, 0, theirs, 0, ticket=p.ticket(tid)))
                else:
                    d.scheduler.send(Accept(f"d{n}", tid, 0, theirs, 0, peer_locator=p.locator()))
                    p.scheduler.send(Begin(f"p{n}", tid, Mode.WRITE))
                    p.step(n + 1, Chunk(f"p{n}", 0, 0, mine[:2], 2))
                    p.scheduler.send(Offer(f"p{n}", tid, 0, mine, 60, Mode.WRITE))
            for n in range(60):
                assert (await d.end_of(f"d{n}", 20.0)).outcome is Outcome.LANDED
                assert (await p.end_of(f"p{n}", 20.0)).outcome is Outcome.RELEASED
                mine = tuple(range(4 * n, 4 * n + 4))
                assert p.memory[0].prompt(mine) == d.memory[0].prompt(tuple(reversed(mine)))
