"""Two engines' memory and streams against a real daemon: gRPC, SCM_RIGHTS, ZMQ, and every byte.

Fake are the engines: nobody computes; their memory is noise.
"""

import asyncio
import os
import random

import pytest

from pdserve.kvd.client import Accept, Begin, Cancel, Offer, Outcome, Renew, Request, Retract
from pdserve.kvd.client.messages import Participant
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import SHORT, FakeEngine, Fault, RunningKvd, plain_layout, running_kvd
from pdserve.kvd.types import Layout, Mode, Span
from pdserve.rpc.errors import Unavailable

SRC, DST = (3, 4, 9, 1), (8, 9, 10, 40)


def new_id() -> bytes:
    """As the proxy mints it."""
    return os.urandom(16)


def same_bytes(p: FakeEngine, src: tuple[int, ...], d: FakeEngine, dst: tuple[int, ...]) -> bool:
    """Whether these blocks hold the same on every rank and layer."""
    return all(a.prompt(src) == b.prompt(dst) for a, b in zip(p.memory, d.memory, strict=True))


def untouched(engine: FakeEngine, but: tuple[int, ...], before: list[list[bytes]]) -> bool:
    """Whether every block outside `but` is as it was."""
    others = [b for b in range(engine.memory[0].layout.num_blocks) if b not in but]
    return [m.prompt(others) for m in engine.memory] == before


def rest(engine: FakeEngine, but: tuple[int, ...]) -> list[list[bytes]]:
    """Every block outside `but`."""
    others = [b for b in range(engine.memory[0].layout.num_blocks) if b not in but]
    return [m.prompt(others) for m in engine.memory]


def all_free(kvd: RunningKvd) -> bool:
    """Whether kvd holds nothing."""
    return not len(kvd.node.leases) and not kvd.node.transfers.book.transfers


@pytest.mark.parametrize("transport", ["shm", "sim"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("offer_first", [True, False])
async def test_read_moves_exactly_these_blocks(transport: str, ranks: int, offer_first: bool) -> None:
    """READ: every rank's bytes arrive, no other block changes, both ends hear it once on all participants."""
    async with (
        running_kvd(transport=transport) as kvd,
        FakeEngine(kvd, ranks=ranks, seed=1) as p,
        FakeEngine(kvd, ranks=ranks, seed=2) as d,
    ):
        before, tid = rest(d, DST), new_id()
        offer = Offer("p", tid, 0, SRC, 60, Mode.READ)
        accept = Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid))
        if offer_first:
            p.scheduler.send(offer)
            await asyncio.sleep(0.02)
            d.scheduler.send(accept)
        else:
            d.scheduler.send(accept)
            await asyncio.sleep(0.02)
            p.scheduler.send(offer)
        landed, released = await d.end_of("d"), await p.end_of("p")
        assert (landed.outcome, released.outcome) == (Outcome.LANDED, Outcome.RELEASED)
        assert same_bytes(p, SRC, d, DST)
        assert untouched(d, DST, before)
        assert landed.facts.kv_bytes == 4096 * 4 * 2 * ranks
        assert (landed.facts.ranks, landed.facts.layers, landed.facts.transport) == (ranks, 2, transport)
        assert landed.facts.first_post_ns <= landed.facts.landed_ns
        assert all_free(kvd)


async def test_layouts_may_differ_where_no_conversion_is_needed() -> None:
    """K and V apart, layer after layer at one end; all layers of a block together at the other."""
    apart = Layout(16, 32, tuple((Span(i * 65536, 1024, 1024), Span(i * 65536 + 32768, 1024, 1024)) for i in range(3)))
    together = Layout(16, 50, tuple((Span(i * 2048, 8192, 1024), Span(i * 2048 + 1024, 8192, 1024)) for i in range(3)))
    async with (
        running_kvd() as kvd,
        FakeEngine(kvd, layout=apart, seed=1) as p,
        FakeEngine(kvd, layout=together, seed=2) as d,
    ):
        tid = new_id()
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (49, 0, 1, 2), 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d")).outcome is Outcome.LANDED
        assert same_bytes(p, SRC, d, (49, 0, 1, 2))


@pytest.mark.parametrize("ranks", [1, 2])
async def test_write_moves_layers_while_the_prompt_is_computed(ranks: int) -> None:
    """WRITE: bytes land before the offer; what was lost on the way comes with it; a prefix hit is skipped."""
    async with (
        running_kvd() as kvd,
        FakeEngine(kvd, ranks=ranks, seed=1) as p,
        FakeEngine(kvd, ranks=ranks, seed=2) as d,
    ):
        before, tid = rest(d, DST[1:]), new_id()
        d.scheduler.send(Accept("d", tid, 0, DST[1:], 1, peer_locator=p.locator()))
        p.scheduler.send(Begin("p", tid, Mode.WRITE))
        p.step(1, Chunk("p", 0, 0, SRC[:3], 2))
        p.step(2, Chunk("p", 0, 3, SRC[3:], 3), layers=[1], end=False)
        await _moved(kvd, tid, ranks * 4096 * (1 * 2 + 1))
        assert not d.heard[Participant.SCHEDULER, 0]
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.WRITE))
        landed, released = await d.end_of("d"), await p.end_of("p")
        assert (landed.outcome, released.outcome) == (Outcome.LANDED, Outcome.RELEASED)
        assert same_bytes(p, SRC[1:], d, DST[1:])
        assert untouched(d, DST[1:], before)
        assert landed.facts.overlapped_bytes == ranks * 4096 * 3
        assert landed.facts.kv_bytes == ranks * 4096 * 3 * 2


async def _moved(kvd: RunningKvd, tid: bytes, nbytes: int) -> None:
    """Waits until this much of a transfer has landed at its first consumer."""
    transfers = kvd.node.transfers.book.transfers

    def moved() -> bool:
        consumers = transfers[tid].consumers if tid in transfers else {}
        return 0 in consumers and consumers[0].bytes_landed >= nbytes

    await kvd.node.until(moved, 5.0)


async def test_n_consumers_share_one_producer() -> None:
    """n = 2: both get the bytes, the producer is released once, after the second."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = new_id()
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ, consumers=2))
        d.scheduler.send(Accept("d0", tid, 0, DST, 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d0")).outcome is Outcome.LANDED
        assert not p.heard[Participant.SCHEDULER, 0]
        d.scheduler.send(Accept("d1", tid, 1, (20, 21, 22, 23), 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d1")).outcome is Outcome.LANDED
        assert (await p.end_of("p")).outcome is Outcome.RELEASED
        assert same_bytes(p, SRC, d, DST)
        assert same_bytes(p, SRC, d, (20, 21, 22, 23))


async def test_a_preempted_attempt_is_fenced_and_the_next_one_lands() -> None:
    """WRITE, retracted between chunks: workers hear `fenced`; then other blocks, overwritten old ones, right bytes."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = new_id()
        d.scheduler.send(Accept("d", tid, 0, DST, 0, peer_locator=p.locator()))
        p.scheduler.send(Begin("p", tid, Mode.WRITE))
        p.step(1, Chunk("p", 0, 0, SRC, 2))
        await _moved(kvd, tid, 4096 * 2 * 2)
        p.scheduler.send(Retract("p", 0, False, "PREEMPTED"))
        assert await p.workers[0].wait_fenced("p", 0, 5.0)
        for block in SRC:
            for layer in range(2):
                p.memory[0].fill(layer, block, 0xEE)
        p.step(1, Chunk("p", 0, 0, SRC, 4))  # a late notice of the old attempt
        again = (30, 31, 32, 33)
        p.step(2, Chunk("p", 1, 0, again, 4))
        p.scheduler.send(Offer("p", tid, 1, again, 60, Mode.WRITE))
        assert (await d.end_of("d")).outcome is Outcome.LANDED
        assert same_bytes(p, again, d, DST)


@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_a_mover_that_lies_is_seen_in_the_bytes(fault: Fault) -> None:
    """Negative control: kvd believes the transport and says LANDED, the comparison above does not."""
    async with running_kvd(transport="sim") as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        kvd.faults.script.append(fault)
        tid = new_id()
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d")).outcome is Outcome.LANDED
        assert not same_bytes(p, SRC, d, DST)


async def test_a_failed_copy_fails_both_ends_and_the_next_transfer_works() -> None:
    """One rank's copy fails: one end per handle, TRANSFER_FAILED, blocks free, and then a good one."""
    async with (
        running_kvd(transport="sim") as kvd,
        FakeEngine(kvd, ranks=2, seed=1) as p,
        FakeEngine(kvd, ranks=2, seed=2) as d,
    ):
        kvd.faults.script += [None, Fault.FAIL]
        for number, outcome in enumerate((Outcome.FAILED, Outcome.LANDED)):
            tid = new_id()
            p.scheduler.send(Offer(f"p{number}", tid, 0, SRC, 60, Mode.READ))
            d.scheduler.send(Accept(f"d{number}", tid, 0, DST, 0, ticket=p.ticket(tid)))
            end, peer = await d.end_of(f"d{number}"), await p.end_of(f"p{number}")
            assert end.outcome is outcome
            if outcome is Outcome.FAILED:
                assert (end.reason, peer.reason) == ("TRANSFER_FAILED", "TRANSFER_FAILED")
            assert all_free(kvd)
        assert same_bytes(p, SRC, d, DST)


async def test_a_copy_that_never_ends_is_torn_down() -> None:
    """Transfer deadline, fence, torn session: both ends EXPIRED within a second, and the pair still works."""
    async with (
        running_kvd(transport="sim", limits=SHORT, lease=5) as kvd,
        FakeEngine(kvd, seed=1) as p,
        FakeEngine(kvd, seed=2) as d,
    ):
        kvd.faults.script.append(Fault.STALL)
        tid = new_id()
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d", 2.0)).outcome is Outcome.EXPIRED
        assert (await p.end_of("p", 2.0)).reason == "TRANSFER_EXPIRED"
        assert all_free(kvd)
        tid = new_id()
        p.scheduler.send(Offer("p2", tid, 0, SRC, 60, Mode.READ))
        d.scheduler.send(Accept("d2", tid, 0, DST, 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d2")).outcome is Outcome.LANDED
        assert same_bytes(p, SRC, d, DST)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("forged", "TICKET_FORGED"),
        ("kind", "TICKET_FORGED"),
        ("expired", "TICKET_EXPIRED"),
        ("other", "TICKET_REFUSED"),
        ("garbage", "TICKET_FORGED"),
        ("none", "INVALID_REQUEST"),
    ],
)
async def test_a_bad_ticket_is_refused_and_harms_nobody(what: str, reason: str) -> None:
    """Forged, of another kind, expired, another transfer's, garbage or none: told why; the good one still lands."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = new_id()
        bad = {
            "forged": p.ticket(tid, key=b"not the cluster's"),
            "kind": p.locator(),
            "expired": p.ticket(tid, expires_at=1.0),
            "other": p.ticket(new_id()),
            "garbage": b"garbage",
            "none": b"",
        }[what]
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        d.scheduler.send(Accept("bad", tid, 0, DST, 0, ticket=bad))
        end = await d.end_of("bad")
        assert (end.outcome, end.reason) == (Outcome.FAILED, reason)
        d.scheduler.send(Accept("good", tid, 0, DST, 0, ticket=p.ticket(tid)))
        assert (await d.end_of("good")).outcome is Outcome.LANDED
        assert same_bytes(p, SRC, d, DST)


async def test_a_ticket_works_once() -> None:
    """A second accept of the same consumer is TRANSFER_USED, while it runs and after."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = new_id()
        d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid)))
        d.scheduler.send(Accept("twin", tid, 0, (50,), 0, ticket=p.ticket(tid)))
        assert (await d.end_of("twin")).reason == "TRANSFER_USED"
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        assert (await d.end_of("d")).outcome is Outcome.LANDED
        d.scheduler.send(Accept("late", tid, 0, (51,), 0, ticket=p.ticket(tid)))
        assert (await d.end_of("late")).reason == "TRANSFER_USED"


async def test_a_ticket_of_an_engine_that_was_restarted_is_stale() -> None:
    """The old epoch's ticket is refused although an engine with the same memory is there again."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=2) as d:
        async with FakeEngine(kvd, seed=1) as old:
            tid = new_id()
            ticket = old.ticket(tid)
        async with FakeEngine(kvd, seed=1):
            d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=ticket))
            assert (await d.end_of("d")).reason == "STALE_EPOCH"


async def test_unlike_engines_do_not_meet() -> None:
    """Another identity: refused by name at the accept; the producer is told at once, not at a deadline."""
    async with (
        running_kvd() as kvd,
        FakeEngine(kvd, identity={"model": "a", "dtype": "bf16"}) as p,
        FakeEngine(kvd, identity={"model": "a", "dtype": "fp8"}) as d,
    ):
        tid = new_id()
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid)))
        end = await d.end_of("d")
        assert (end.reason, "dtype: bf16 != fp8" in end.detail) == ("INCOMPATIBLE_ENGINES", True)
        assert (await p.end_of("p")).reason == "CONSUMER_FAILED"


@pytest.mark.parametrize("dead", ["producer", "consumer"])
async def test_death_is_told_to_the_peer_at_once(dead: str) -> None:
    """The memory socket's end is the death of the rank: PEER_LOST while a slow copy runs, memory unmapped."""
    async with running_kvd(transport="sim") as kvd:
        kvd.faults.script.append(Fault.STALL)
        kvd.node.transfers.book.limits = SHORT
        async with FakeEngine(kvd, ranks=2, seed=1) as p, FakeEngine(kvd, ranks=2, seed=2) as d:
            tid = new_id()
            p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
            d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid)))
            await kvd.node.until(lambda: bool(kvd.node.transfers.book.ops), 5.0)
            gone, left = (p, d) if dead == "producer" else (d, p)
            gone.rank[1].close()
            end = await left.end_of("d" if dead == "producer" else "p", 2.0)
            assert (end.outcome, end.reason) == (Outcome.FAILED, "PEER_LOST")
            own = await gone.end_of("p" if dead == "producer" else "d", 2.0)
            assert own.reason == "ENGINE_DIED"
            await kvd.node.until(lambda: all(key.engine_id != gone.engine_id for key in kvd.node.mapped), 2.0)
            assert all_free(kvd)


async def test_a_lost_stream_that_comes_back_loses_nothing() -> None:
    """The scheduler's stream breaks while a transfer is open: it attaches again and both ends are heard once."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = new_id()
        d.scheduler.send(Accept("d", tid, 0, DST, 0, ticket=p.ticket(tid)))
        p.scheduler.send(Begin("p", tid, Mode.READ))
        await asyncio.sleep(0.02)
        for member in [m for e in (p, d) for m in kvd.node.attachments.of(e.engine_id)]:
            member.fail(Unavailable("cut by the test"))
        p.scheduler.send(Offer("p", tid, 0, SRC, 60, Mode.READ))
        assert (await d.end_of("d")).outcome is Outcome.LANDED
        assert (await p.end_of("p")).outcome is Outcome.RELEASED
        assert same_bytes(p, SRC, d, DST)


async def test_a_stream_that_stays_away_fails_its_transfers() -> None:
    """After the grace the peer hears PEER_LOST; the engine's memory stays and its epoch is still good."""
    async with running_kvd(grace=0.1) as kvd, FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = new_id()
        d.scheduler.send(Accept("d", tid, 0, DST, 0, peer_locator=p.locator()))
        p.scheduler.send(Begin("p", tid, Mode.WRITE))
        await asyncio.sleep(0.02)
        await p.scheduler.aclose()
        assert (await d.end_of("d", 2.0)).reason == "PEER_LOST"
        assert p.engine_id in {key.engine_id for key in kvd.node.mapped}


async def test_cancel_and_lease_end_what_nobody_wants() -> None:
    """A cancel by the worker's stream, and a lease that is not renewed, end the producer's handle."""
    async with running_kvd(lease=0.3) as kvd, FakeEngine(kvd, seed=1) as p:
        one, two = new_id(), new_id()
        p.scheduler.send(Begin("one", one, Mode.WRITE))
        p.workers[0].send(Cancel(one, "CANCELLED"))
        assert (await p.end_of("one")).outcome is Outcome.CANCELLED
        p.scheduler.send(Begin("two", two, Mode.WRITE))
        for _ in range(5):
            await asyncio.sleep(0.1)
            p.workers[0].send(Renew((two,)))
        assert not [e for e in p.heard[Participant.SCHEDULER, 0] if e.handle == "two"]
        assert (await p.end_of("two", 2.0)).reason == "TRANSFER_EXPIRED"
        assert all_free(kvd)


async def test_many_transfers_at_once_keep_their_bytes_apart() -> None:
    """Both engines produce and consume 40 transfers each, in both modes, at random: every byte is right."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    layout = plain_layout(256, layers=3, block_bytes=512)
    async with (
        running_kvd() as kvd,
        FakeEngine(kvd, ranks=2, layout=layout, seed=1) as a,
        FakeEngine(kvd, ranks=2, layout=layout, seed=2) as b,
    ):
        jobs = []
        for source, target, half in ((a, b, 0), (b, a, 1)):
            targets, sources = list(range(120)), list(range(128, 248))
            chance.shuffle(targets)
            chance.shuffle(sources)
            for i in range(40):
                src, dst = tuple(sources[3 * i : 3 * i + 3]), tuple(targets[3 * i : 3 * i + 3])
                jobs.append((f"{half}-{i}", new_id(), chance.choice(list(Mode)), source, src, target, dst))
        chance.shuffle(jobs)
        for name, tid, mode, source, src, target, dst in jobs:
            ticket, locator = (source.ticket(tid), b"") if mode is Mode.READ else (b"", source.locator())
            accept = Accept(f"c{name}", tid, 0, dst, 0, ticket=ticket, peer_locator=locator)
            says: list[tuple[FakeEngine, Request]] = [(target, accept)]
            held = Offer(f"p{name}", tid, 0, src, 40, mode)
            begin: list[tuple[FakeEngine, Request]] = [(source, Begin(f"p{name}", tid, mode)), (source, held)]
            for engine, message in (says + begin) if chance.random() < 0.5 else (begin + says):
                engine.scheduler.send(message)
        for name, _, _, source, src, target, dst in jobs:
            assert (await target.end_of(f"c{name}")).outcome is Outcome.LANDED
            assert (await source.end_of(f"p{name}")).outcome is Outcome.RELEASED
            assert same_bytes(source, src, target, dst), name
        assert all_free(kvd)
