"""The host's view of hand-overs, with a real kvd and simulated engines."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pdserve.costmodel import CostModel
from pdserve.engine.hosting.handoff_host import HandoffHost
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.kvd.client import AttachConfig, Outcome
from pdserve.kvd.client.messages import Welcome
from pdserve.kvd.testing import RunningKvd, running_kvd
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import DeadlinePassed, EngineDied, KvdUnavailable, RequestCancelled, TransferUsed

PROMPT = [i % 200 for i in range(70)]
QUICK = AttachConfig(reconnect_deadline=0.3)


async def host_of(kvd: RunningKvd, engine: SimEngine) -> HandoffHost:
    host = HandoffHost(kvd.socket, engine.info.engine_id, engine.info.identity, config=QUICK)
    await host.start(5)
    return host


@pytest.mark.parametrize("mode", list(Mode), ids=["read", "write"])
async def test_both_hosts_hear_the_ends_with_facts(cluster: Any, helpers: Any, mode: Mode) -> None:
    """Producer's host: RELEASED; consumer's: LANDED; both with bytes, blocks, transport and times."""
    slow = CostModel(prefill_base=0.05, prefill_per_token=0.0)
    p, d = await cluster.engine(SimConfig(token_budget=16, cost=slow)), await cluster.engine()
    ph, dh = await host_of(cluster.kvd, p), await host_of(cluster.kvd, d)
    tid = helpers.transfer_id()
    with ph.register(tid) as made, dh.register(tid, 0) as taken:
        producing = asyncio.create_task(helpers.collect(p, cluster.produce(PROMPT, mode, tid)))
        if mode is Mode.READ:
            await producing
        await helpers.collect(d, cluster.consume(p, PROMPT, mode, tid))
        await producing
        released, landed = await made.end(5), await taken.end(5)
    assert (released.outcome, landed.outcome) == (Outcome.RELEASED, Outcome.LANDED)
    assert landed.facts.kv_bytes == 5 * 128 * 4
    assert (landed.facts.blocks, landed.facts.layers, landed.facts.ranks, landed.facts.transport) == (5, 4, 1, "shm")
    assert 0 < landed.facts.accepted_ns <= landed.facts.first_post_ns <= landed.facts.landed_ns
    assert released.facts.offered_ns > 0
    assert (landed.facts.overlapped_bytes > 0) is (mode is Mode.WRITE)
    assert ph.watching == dh.watching == 0
    await ph.aclose()
    await dh.aclose()
    await cluster.idle()


async def test_a_lease_lives_while_it_is_watched(helpers: Any) -> None:
    """Renewed every third of it, a lease of a second outlives two and a half; unwatched it expires and
    the producer's blocks come back."""
    async with running_kvd(lease=1.0, accept=60) as kvd:
        engine = await SimEngine.start(SimConfig(), kvd.socket)
        host = await host_of(kvd, engine)
        cluster = helpers.Cluster(kvd, None)
        tid = helpers.transfer_id()
        watch = host.register(tid)
        await helpers.collect(engine, cluster.produce(PROMPT, Mode.READ, tid))
        await asyncio.sleep(2.5)
        assert watch.result is None
        with pytest.raises(DeadlinePassed):
            await watch.end(0.01)
        watch.close()
        await helpers.until(lambda: engine.idle)
        await host.aclose()
        await engine.aclose()


async def test_an_offer_lives_while_decode_still_wants_it(helpers: Any) -> None:
    """A request that stands in decode's queue for longer than kvd's accept deadline: its service's watch
    keeps the offer; without the watch it expires and the producer's blocks come back."""
    async with running_kvd(accept=1.0) as kvd:
        engine, other = [await SimEngine.start(SimConfig(), kvd.socket) for _ in range(2)]
        host, waiting = await host_of(kvd, engine), await host_of(kvd, other)
        local = helpers.Cluster(kvd, None)
        tid = helpers.transfer_id()
        with host.register(tid) as made:
            with waiting.register(tid, 0):
                await helpers.collect(engine, local.produce(PROMPT, Mode.READ, tid))
                await asyncio.sleep(2.5)  # more than two accept deadlines
                assert made.result is None
            end = await made.end(20)
        assert end.outcome is Outcome.EXPIRED
        for closing in (host, waiting, engine, other):
            await closing.aclose()


async def test_cancel_ends_both(cluster: Any, helpers: Any) -> None:
    """A cancelled transfer ends at once with the reason, and an id that kvd has never heard of is
    remembered."""
    engine = await cluster.engine()
    host = await host_of(cluster.kvd, engine)
    tid, later = helpers.transfer_id(), helpers.transfer_id()
    watch = host.register(tid)
    await helpers.collect(engine, cluster.produce(PROMPT, Mode.READ, tid))
    host.cancel(tid, RequestCancelled.reason)
    end = await watch.end(5)
    assert (end.outcome, end.reason) == (Outcome.CANCELLED, "CANCELLED")
    host.cancel(later, RequestCancelled.reason)
    watch = host.register(later)
    await helpers.collect(engine, cluster.produce(PROMPT, Mode.READ, later))
    assert (await watch.end(5)).outcome is Outcome.CANCELLED
    watch.close()
    watch.close()
    await cluster.idle()
    await host.aclose()


async def test_an_end_is_watched_by_one(cluster: Any) -> None:
    """The same end twice at once is TRANSFER_USED; again after `close` it is not; other consumers'
    ends are their own."""
    engine = await cluster.engine()
    host = await host_of(cluster.kvd, engine)
    first = host.register(bytes(16))
    host.register(bytes(16), 0)
    host.register(bytes(16), 1)
    with pytest.raises(TransferUsed):
        host.register(bytes(16))
    first.close()
    second = host.register(bytes(16))
    first.close()
    with pytest.raises(TransferUsed):
        host.register(bytes(16))
    second.close()
    await host.aclose()


async def test_a_lost_kvd_ends_every_watch(helpers: Any) -> None:
    """When kvd stays away, watches end with KVD_UNAVAILABLE within the reconnect deadline (here 0.3 s,
    else 5 s), and new ones are refused at once."""
    async with running_kvd() as kvd:
        engine = await SimEngine.start(SimConfig(), kvd.socket)
        host = await host_of(kvd, engine)
        watch = host.register(bytes(16))
    began = time.monotonic()
    end = await watch.end(5)
    assert (end.outcome, end.reason) == (Outcome.FAILED, "KVD_UNAVAILABLE")
    assert time.monotonic() - began < 4
    with pytest.raises(KvdUnavailable):
        host.register(helpers.transfer_id())
    await host.aclose()
    await engine.aclose()


async def test_closing_ends_every_watch(cluster: Any) -> None:
    """Nobody waits for a host that has closed."""
    engine = await cluster.engine()
    host = await host_of(cluster.kvd, engine)
    watch = host.register(bytes(16))
    waiting = asyncio.create_task(watch.end(5))
    await asyncio.sleep(0)
    await host.aclose()
    await host.aclose()
    assert (await waiting).reason == "KVD_UNAVAILABLE"


async def test_a_kvd_that_restarts_costs_only_what_was_in_flight(helpers: Any, tmp_path: Any) -> None:
    """kvd dies and comes back: what was held is given back, later hand-overs work, the engines live."""
    async with running_kvd(tmp_path / "k") as kvd:
        p = await SimEngine.start(SimConfig(), kvd.socket)
        d = await SimEngine.start(SimConfig(), kvd.socket)
        cluster = helpers.Cluster(kvd, None)
        await helpers.collect(p, cluster.produce(PROMPT, Mode.READ, helpers.transfer_id()))
        assert not p.idle
    async with running_kvd(tmp_path / "k", accept=2.0) as kvd:
        cluster = helpers.Cluster(kvd, None, [p, d])
        await helpers.until(lambda: p.idle)
        async with asyncio.timeout(40):
            while True:  # while it re-attaches an engine may still answer KVD_UNAVAILABLE, and nothing else
                try:
                    _, got = await cluster.hand_over(p, d, PROMPT, Mode.WRITE)
                    break
                except KvdUnavailable:
                    await helpers.until(lambda: p.idle and d.idle)
        assert got[-1].recomputed_tokens == 0
        await cluster.idle()
        await p.aclose()
        with pytest.raises(EngineDied):
            await helpers.collect(p, cluster.produce(PROMPT, Mode.READ, helpers.transfer_id()))
        await d.aclose()


def test_a_kvd_that_does_not_say_how_often_is_renewed_by_its_lease(tmp_path: Path) -> None:
    """An older kvd's welcome has no renewal time: a third of its lease, not as often as can be."""
    host = HandoffHost(str(tmp_path / "kvd.sock"), "e", {})
    assert host.renew_s == 0.0
    for renew_s, expected in ((0.0, 3.0), (1.5, 1.5)):
        host._attachment._welcome = Welcome("k", "", "", lease_s=9.0, renew_s=renew_s, fence_s=1.0)
        assert host.renew_s == expected


async def test_a_failure_to_renew_is_told(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would let every hand-over run out: the open watches end, new ones are refused, and the log says why."""

    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    engine = await cluster.engine()
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(HandoffHost, "renew_s", 0.01)
        host = await host_of(cluster.kvd, engine)
        patch.setattr(host._attachment, "send", fails)
        end = await host.register(bytes(16)).end(5)
    assert (end.outcome, end.reason) == (Outcome.FAILED, "INTERNAL")
    assert "RuntimeError: a defect" in end.detail
    with pytest.raises(KvdUnavailable, match="renew"):
        host.register(bytes(15) + b"1")
    assert [entry["log_level"] for entry in logs if entry["event"] == "renewing_failed"] == ["error"]
    await host.aclose()
