"""Simulated engines and a real kvd: what arrives is what was made, and every block comes back."""

import asyncio
import contextlib
from typing import Any

import pytest

from pdserve.costmodel import CostModel
from pdserve.engine.handoff.scheduler import Fence, StepPlan
from pdserve.engine.port import Finish, Request, Sampling
from pdserve.engine.sim import SimConfig
from pdserve.kvd.testing import Fault
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import (
    EngineDied,
    IncompatibleEngines,
    KvdUnavailable,
    PeerLost,
    ProducerFailed,
    StaleEpoch,
    TicketForged,
    TransferFailed,
    TransferUsed,
)

MODES = pytest.mark.parametrize("mode", list(Mode), ids=["read", "write"])
LENGTHS = [1, 2, 15, 16, 17, 33, 160]
SLOW = CostModel(prefill_base=0.03, prefill_per_token=0.0, decode_base=0.0, decode_per_seq=0.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * i * i + i) % 250 for i in range(length)]


@MODES
@pytest.mark.parametrize("length", LENGTHS)
async def test_both_legs_give_what_one_engine_gives(cluster: Any, helpers: Any, mode: Mode, length: int) -> None:
    """Greedy text over a hand-over is the text of one engine alone, for every shape of prompt;
    nothing is recomputed, the blocks are offered and all come back."""
    p, d = await cluster.engine(), await cluster.engine()
    alone = await helpers.collect(p, Request("alone", tuple(prompt(length)), helpers.GREEDY))
    made, got = await cluster.hand_over(p, d, prompt(length), mode)
    assert helpers.text(got) == helpers.text(alone)
    assert (made[-1].offered_tokens, made[-1].offered_blocks) == (length, -(-length // 16))
    assert made[-1].token_ids == alone[0].token_ids
    assert (got[-1].recomputed_tokens, got[-1].finish) == (0, Finish.LENGTH)
    await cluster.idle()
    assert p.corrupt == d.corrupt == 0


@MODES
async def test_chunks_ranks_and_cached_prefixes(cluster: Any, helpers: Any, mode: Mode) -> None:
    """Chunked prefill, two ranks, prefix hits on either side: still the same text and bytes."""
    config = SimConfig(ranks=2, token_budget=24, layers=3)
    p, d = await cluster.engine(config), await cluster.engine(config)
    alone = await helpers.collect(p, Request("alone", tuple(prompt(100)), helpers.GREEDY))
    for cached_at_p, cached_at_d in ((96, 0), (96, 96)):
        made, got = await cluster.hand_over(p, d, prompt(100), mode)
        assert helpers.text(got) == helpers.text(alone)
        assert (made[-1].cached_tokens, got[-1].cached_tokens) == (cached_at_p, cached_at_d)
    await cluster.idle()


async def test_write_moves_bytes_while_prefill_computes(cluster: Any, helpers: Any) -> None:
    """WRITE overlaps: bytes have landed before the offer."""
    config = SimConfig(token_budget=16, cost=SLOW)
    p, d = await cluster.engine(config), await cluster.engine(SimConfig())
    await cluster.hand_over(p, d, prompt(64), Mode.WRITE)
    await cluster.idle()
    states = cluster.kvd.node.transfers.book
    assert states.ended.get("landed", 0) == 1


@MODES
async def test_three_consumers_of_one_prompt(cluster: Any, helpers: Any, mode: Mode) -> None:
    """n = 3: each consumer takes the prompt, the producer is released after the last."""
    p, d = await cluster.engine(), await cluster.engine()
    tid = helpers.transfer_id()
    legs = [cluster.consume(p, prompt(40), mode, tid, consumer=i) for i in range(3)]
    producing = asyncio.create_task(helpers.collect(p, cluster.produce(prompt(40), mode, tid, consumers=3)))
    if mode is Mode.READ:
        await producing
    answers = await asyncio.gather(*(helpers.collect(d, leg) for leg in legs))
    await producing
    assert len({helpers.text(answer) for answer in answers}) == 1
    await cluster.idle()


@MODES
@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_a_mover_that_lies_is_found_out(faulty: Any, mode: Mode, fault: Fault) -> None:
    """Negative control: bytes that are not there, or another block's, fail the request with an error."""
    p, d = await faulty.engine(SimConfig(layers=1)), await faulty.engine(SimConfig(layers=1))
    faulty.kvd.faults.script = [fault] * 50
    with pytest.raises(EngineDied, match="corrupt KV before its first step"):
        await faulty.hand_over(p, d, prompt(64), mode)
    assert d.corrupt == 1
    await faulty.idle()


async def test_scribbled_source_blocks_are_found_out(cluster: Any, helpers: Any) -> None:
    """Negative control: a source that changes after it was computed does not pass."""
    p, d = await cluster.engine(), await cluster.engine()
    tid = helpers.transfer_id()
    await helpers.collect(p, cluster.produce(prompt(64), Mode.READ, tid))
    p.memory().words[2, 1] ^= 1
    with pytest.raises(EngineDied, match="layer 2"):
        await helpers.collect(d, cluster.consume(p, prompt(64), Mode.READ, tid))
    await cluster.idle()
    assert p.corrupt == 1  # also found when the blocks were released


@MODES
async def test_a_failed_copy_fails_or_is_recomputed_as_the_request_says(faulty: Any, helpers: Any, mode: Mode) -> None:
    """Policy per request: a typed error, or the same text computed at decode."""
    p, d = await faulty.engine(SimConfig(layers=1)), await faulty.engine(SimConfig(layers=1))
    alone = await helpers.collect(p, Request("alone", tuple(prompt(50)), helpers.GREEDY))
    faulty.kvd.faults.script = [Fault.FAIL] * 20
    tid = helpers.transfer_id()
    producing = asyncio.create_task(helpers.collect(p, faulty.produce(prompt(50), mode, tid)))
    if mode is Mode.READ:
        await producing
    with pytest.raises(TransferFailed):
        await helpers.collect(d, faulty.consume(p, prompt(50), mode, tid))
    await producing
    await faulty.idle()
    faulty.kvd.faults.script = [Fault.FAIL] * 20
    _, got = await faulty.hand_over(p, d, prompt(50), mode, recompute=True)
    assert helpers.text(got) == helpers.text(alone)
    assert got[-1].recomputed_tokens == 50
    await faulty.idle()


@MODES
async def test_an_abandoned_consumer_gives_everything_back(faulty: Any, helpers: Any, mode: Mode) -> None:
    """The client goes while the bytes are under way: both engines get all blocks back."""
    p, d = await faulty.engine(SimConfig(layers=1)), await faulty.engine(SimConfig(layers=1))
    faulty.kvd.faults.script = [Fault.STALL]
    tid = helpers.transfer_id()
    producing = asyncio.create_task(helpers.collect(p, faulty.produce(prompt(50), mode, tid)))
    if mode is Mode.READ:
        await producing
    consuming = asyncio.create_task(helpers.collect(d, faulty.consume(p, prompt(50), mode, tid)))
    await helpers.until(lambda: not faulty.kvd.faults.script)
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    await producing
    await helpers.until(lambda: p.idle and d.idle, 15)
    await faulty.idle()


async def test_an_aborted_write_prefill_tells_decode_at_once(cluster: Any, helpers: Any) -> None:
    """Prefill gives up in the middle of its chunks: decode's request fails with the reason, long
    before any deadline, and no block stays behind."""
    config = SimConfig(token_budget=16, cost=SLOW)
    p, d = await cluster.engine(config), await cluster.engine()
    tid = helpers.transfer_id()
    producing = asyncio.create_task(helpers.collect(p, cluster.produce(prompt(200), Mode.WRITE, tid)))
    consuming = asyncio.create_task(helpers.collect(d, cluster.consume(p, prompt(200), Mode.WRITE, tid)))
    await helpers.until(lambda: p.load().steps >= 2)
    producing.cancel()
    with pytest.raises(ProducerFailed):
        await asyncio.wait_for(consuming, 5)
    await asyncio.gather(producing, return_exceptions=True)
    await cluster.idle()


async def test_a_preempted_write_producer_is_fenced_and_still_right(cluster: Any, helpers: Any) -> None:
    """The pool runs out in the middle of a WRITE: the producer loses its blocks, others write them
    after the fence, it starts again from nothing, and decode gets the right bytes.

    8 blocks: four short requests hold one each and need a second one at their 17th token, when
    the producer has computed 3 of its 4.
    """
    gate = helpers.Gate()
    p = await cluster.engine(SimConfig(num_blocks=8, token_budget=16, layers=2), sleep=gate.sleep)
    d = await cluster.engine(SimConfig(layers=2))
    short = Sampling(max_tokens=25, temperature=0)
    noise = [
        asyncio.create_task(helpers.collect(p, Request(f"noise{i}", tuple(prompt(2, i)), short))) for i in range(4)
    ]
    await gate.let(10)
    tid = helpers.transfer_id()
    legs = [
        asyncio.create_task(helpers.collect(p, cluster.produce(prompt(64, 99), Mode.WRITE, tid))),
        asyncio.create_task(helpers.collect(d, cluster.consume(p, prompt(64, 99), Mode.WRITE, tid))),
    ]
    transfers = cluster.kvd.node.transfers.book.transfers
    await helpers.until(lambda: tid in transfers and 0 in transfers[tid].consumers)
    while not transfers[tid].consumers[0].first_post_ns:
        assert not p.preemptions, "the producer was preempted before anything was copied"
        await gate.let(1)
        with contextlib.suppress(TimeoutError):  # this step had nothing of it
            await helpers.until(lambda: transfers[tid].consumers[0].first_post_ns, 0.5)
    while not p.preemptions:
        await gate.let(1)
    gate.open()
    _, got = await asyncio.gather(*legs)
    await asyncio.gather(*noise)
    alone = await helpers.collect(d, Request("alone", tuple(prompt(64, 99)), helpers.GREEDY))
    assert helpers.text(got) == helpers.text(alone)
    await cluster.idle()
    assert p.corrupt == d.corrupt == 0


@MODES
async def test_the_death_of_a_producer_reaches_its_consumer(cluster: Any, helpers: Any, mode: Mode) -> None:
    """The other engine dies with a transfer open: a typed error, not a wait."""
    p, d = await cluster.engine(SimConfig(token_budget=16, cost=SLOW)), await cluster.engine()
    tid = helpers.transfer_id()
    producing = asyncio.create_task(helpers.collect(p, cluster.produce(prompt(64), mode, tid)))
    if mode is Mode.READ:
        await producing
        await p.kill("test")
        with pytest.raises((PeerLost, StaleEpoch)):
            await helpers.collect(d, cluster.consume(p, prompt(64), mode, tid))
    else:
        consuming = asyncio.create_task(helpers.collect(d, cluster.consume(p, prompt(64), mode, tid)))
        await helpers.until(lambda: p.load().steps >= 1)
        await p.kill("test")
        with pytest.raises((PeerLost, StaleEpoch)):  # the second, where kvd heard of the consumer after the death
            await asyncio.wait_for(consuming, 5)
        with pytest.raises(EngineDied):
            await producing
    assert await p.failed() == "test"
    cluster.engines.remove(p)
    await cluster.idle()


async def test_tickets_are_checked(cluster: Any, helpers: Any) -> None:
    """A forged ticket, and a second use, end the request with their own errors; the true consumer
    is not harmed."""
    p, d = await cluster.engine(), await cluster.engine()
    tid = helpers.transfer_id()
    await helpers.collect(p, cluster.produce(prompt(20), Mode.READ, tid))
    good = cluster.consume(p, prompt(20), Mode.READ, tid)
    forged = cluster.consume(p, prompt(20), Mode.READ, tid)
    object.__setattr__(forged.kv, "ticket", forged.kv.ticket[:-1] + b"!")
    with pytest.raises(TicketForged):
        await helpers.collect(d, forged)
    assert len(await helpers.collect(d, good)) == 8
    again = cluster.consume(p, prompt(20), Mode.READ, tid)
    with pytest.raises(TransferUsed):
        await helpers.collect(d, again)
    await cluster.idle()


async def test_engines_of_another_shape_are_refused(cluster: Any, helpers: Any) -> None:
    """Unequal identities do not exchange KV; what differs is named."""
    p, d = await cluster.engine(), await cluster.engine(SimConfig(layers=5))
    tid = helpers.transfer_id()
    await helpers.collect(p, cluster.produce(prompt(20), Mode.READ, tid))
    with pytest.raises(IncompatibleEngines, match="layers: 4 != 5"):
        await helpers.collect(d, cluster.consume(p, prompt(20), Mode.READ, tid))
    await cluster.idle()


async def test_an_engine_without_a_kvd_refuses_hand_overs(helpers: Any, cluster: Any) -> None:
    """Alone, an engine serves plain requests and refuses a part in a hand-over at once."""
    from pdserve.engine.sim import SimEngine

    engine = await SimEngine.start(SimConfig())
    with pytest.raises(KvdUnavailable):
        await helpers.collect(engine, cluster.produce(prompt(5), Mode.READ, bytes(16)))
    assert len(await helpers.collect(engine, Request("x", (1, 2), helpers.GREEDY))) == 8
    await engine.aclose()


async def test_a_fence_that_does_not_come_stops_the_step(cluster: Any) -> None:
    """The engine would rather die than write blocks that kvd has not let go."""
    engine = await cluster.engine(SimConfig(ranks=2, fence_timeout=0.05))
    with pytest.raises(EngineDied, match="attempt 3 of nobody's"):
        await engine._links.begin(StepPlan(1, fences=(Fence("nobody's", 3),)))


@MODES
async def test_many_at_once_over_small_pools(cluster: Any, helpers: Any, mode: Mode) -> None:
    """Forty hand-overs through pools that hold a few: all right, all blocks back."""
    config = SimConfig(num_blocks=24, token_budget=32, layers=2)
    p, d = await cluster.engine(config), await cluster.engine(config)
    legs = [cluster.hand_over(p, d, prompt(10 + 3 * i, i), mode, recompute=True) for i in range(40)]
    for index, (_, got) in enumerate(await asyncio.gather(*legs)):
        assert sum(len(o.token_ids) for o in got) == 8, index
    await cluster.idle()
    assert p.corrupt == d.corrupt == 0
