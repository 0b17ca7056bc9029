"""How far a call has come when it fails, as prefill's and decode's sessions note it.

Fake: the engine and kvd, which say what each test tells them to.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from pdserve.decode.messages import Ask, Source
from pdserve.decode.session import DecodeConfig, Decoder
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.stamps import Cut, Progress
from pdserve.engine.hosting.testing import INFO, ScriptedEngine, ScriptedHandoffs
from pdserve.engine.port import EngineTimes, Output, Sampling
from pdserve.kvd.client.messages import Facts, Outcome
from pdserve.kvd.types import Mode
from pdserve.prefill import session as prefill
from pdserve.rpc.errors import ConsumerFailed, EngineDied, PdserveError, PeerLost, ProducerFailed
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import FAILPOINTS, Point
from pdserve.runtime.signing import Signer

TID = bytes(range(16))
PROMPT = (1, 2, 3)
SIGNER = Signer(b"the key of this cluster")
UNTOLD = {Cut.DECODE_BLOCKS_RESERVED, Cut.KV_LANDED, Cut.DECODE_SCHEDULED}


class Side:
    """A decoder or a prefiller with one request, which runs until it fails."""

    def __init__(self) -> None:
        self.engine, self.handoffs, self.progress = ScriptedEngine(), ScriptedHandoffs(), Progress()
        self.peers = Peers(INFO, "unix:/kvd", SIGNER)
        self.work: asyncio.Task[None] | None = None

    def decode(self, **changes: Any) -> None:
        """Begins to take a READ over."""
        producer = Peers(replace(INFO, engine_id="p"), "unix:/kvd", SIGNER)
        ticket = producer.our_ticket(TID, len(PROMPT), 1, 0.0)
        fields: dict[str, Any] = {"answers": 1, "source": Source(TID, Mode.READ, ticket), "recompute": False}
        ask = Ask("r", PROMPT, Sampling(), **(fields | changes))
        decoder = Decoder(self.engine, self.handoffs, self.peers, Calls(), Clock(), DecodeConfig())
        transfer_id = TID if ask.source is not None else None
        self.work = asyncio.create_task(_all(decoder.run(transfer_id, lambda: ask, self.progress)))

    def prefill(self) -> None:
        """Begins to compute a READ."""
        ask = prefill.Ask("r", TID, Mode.READ, PROMPT, Sampling(), b"", 1)
        prefiller = prefill.Prefiller(self.engine, self.handoffs, self.peers, Calls(), Clock(), prefill.PrefillConfig())
        self.work = asyncio.create_task(_all(prefiller.run(TID, lambda: ask, self.progress)))

    async def fails(self, error: type[PdserveError]) -> Progress:
        """Waits for that; how far it came."""
        assert self.work is not None
        with pytest.raises(error):
            await asyncio.wait_for(self.work, 5)
        return self.progress


async def _all(work: AsyncGenerator[Any, None]) -> None:
    async for _ in work:
        pass


@pytest.fixture
async def side() -> Side:
    """Idle."""
    return Side()


async def test_decode_whose_bytes_did_not_come(side: Side) -> None:
    """kvd says when the blocks were reserved; that nothing landed and nothing was computed is sure."""
    side.decode()
    await side.engine.next_run()
    side.handoffs.end(TID, 0, Outcome.FAILED, "PEER_LOST", Facts(accepted_ns=15, first_post_ns=20))
    progress = await side.fails(PeerLost)
    assert (progress.stamps, progress.unseen) == ({Cut.DECODE_BLOCKS_RESERVED: 15}, set())
    assert progress.facts == Facts(accepted_ns=15, first_post_ns=20)


async def test_a_kvd_that_does_not_say_leaves_a_doubt(side: Side) -> None:
    """Without a time of theirs the blocks may have been reserved or not."""
    side.decode()
    await side.engine.next_run()
    side.handoffs.end(TID, 0, Outcome.FAILED, "PEER_LOST")
    progress = await side.fails(PeerLost)
    assert (progress.stamps, progress.unseen, progress.facts) == ({}, {Cut.DECODE_BLOCKS_RESERVED}, None)


async def test_decode_that_was_never_asked_of_the_engine(side: Side) -> None:
    """It failed before: nothing was passed unseen."""
    FAILPOINTS.arm(Point.DECODE_RECEIVED, "error(CONSUMER_FAILED)")
    try:
        side.decode()
        progress = await side.fails(ConsumerFailed)
    finally:
        FAILPOINTS.clear()
    assert (progress.stamps, progress.unseen) == ({}, set())


async def test_an_engine_that_died_leaves_what_it_has_not_told(side: Side) -> None:
    """kvd has said nothing, nor has the engine: each of its points may have been passed."""
    side.decode()
    (await side.engine.next_run()).fail(EngineDied("gone"))
    assert (await side.fails(EngineDied)).unseen == UNTOLD


@pytest.mark.parametrize("told", [False, True])
async def test_decode_that_failed_in_its_queue_or_its_first_step(side: Side, told: bool) -> None:
    """The KV had landed; whether it was in a step is known where the engine has said so."""
    side.decode()
    run = await side.engine.next_run()
    side.handoffs.end(TID, 0, Outcome.LANDED, facts=Facts(accepted_ns=15, landed_ns=30))
    if told:
        run.say(Output(times=EngineTimes(scheduled_ns=40)))
    run.fail(EngineDied("gone"))
    progress = await side.fails(EngineDied)
    landed = {Cut.DECODE_BLOCKS_RESERVED: 15, Cut.KV_LANDED: 30}
    assert progress.stamps == landed | ({Cut.DECODE_SCHEDULED: 40} if told else {})
    assert progress.unseen == (set() if told else {Cut.DECODE_SCHEDULED})


async def test_decode_that_failed_at_its_text(side: Side) -> None:
    """The engine has sampled a token; the service failed before it had the text."""
    FAILPOINTS.arm(Point.DECODE_TEXT, "error(CONSUMER_FAILED)")
    try:
        side.decode(source=None)
        (await side.engine.next_run()).say(Output((65,), "A", times=EngineTimes(40, 50)))
        progress = await side.fails(ConsumerFailed)
    finally:
        FAILPOINTS.clear()
    assert progress.stamps == {Cut.DECODE_SCHEDULED: 40, Cut.FIRST_TOKEN_SAMPLED: 50}
    assert progress.unseen == set()


async def test_prefill_that_failed_after_its_forward_pass(side: Side) -> None:
    """All of its points were passed, the last before the offer; the engine's times are there."""
    FAILPOINTS.arm(Point.PREFILL_READY, "error(PRODUCER_FAILED)")
    try:
        side.prefill()
        (await side.engine.next_run()).answer([65])
        progress = await side.fails(ProducerFailed)
    finally:
        FAILPOINTS.clear()
    # This engine has no times: what was passed is not stamped.
    assert (progress.stamps, progress.unseen) == ({}, {Cut.PREFILL_SCHEDULED, Cut.PREFILL_FORWARD_END})


async def test_prefill_that_failed_in_its_forward_pass(side: Side) -> None:
    """The engine has said when it had it in a step, and no more."""
    side.prefill()
    (await side.engine.next_run()).say(Output(times=EngineTimes(scheduled_ns=11))).fail(EngineDied("gone"))
    progress = await side.fails(EngineDied)
    assert (progress.stamps, progress.unseen) == ({Cut.PREFILL_SCHEDULED: 11}, set())
