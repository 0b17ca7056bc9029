"""A leg that fails, with legs that the test plays: what becomes of the other one, and what the client is told."""

import pytest

from pdserve.proxy.testing import Rig
from pdserve.proxy.testing.rig import done, ready, tokens
from pdserve.proxy.types import (
    Delta,
    Finish,
    Mode,
    OnFailure,
)
from pdserve.rpc.errors import (
    ConsumerFailed,
    EngineDied,
    InvalidRequest,
    PeerLost,
    ProducerFailed,
    TransferExpired,
)


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_prefill_that_fails_before_its_offer_ends_decode_at_once(mode: Mode) -> None:
    """The client gets prefill's own reason, with no deadline to wait for."""
    rig = Rig()
    run = rig.start(rig.job(mode))
    prefill = await rig.legs.nth_prefill(0)
    prefill.fail(InvalidRequest("the engine refuses this seed"))
    with pytest.raises(InvalidRequest, match="refuses this seed"):
        await run.task
    if mode is Mode.WRITE:
        assert isinstance(rig.legs.decodes[0].cancelled, InvalidRequest)
    else:
        assert rig.legs.decodes == []
    await rig.nothing_is_held()


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_decode_that_fails_ends_prefill_at_once(mode: Mode) -> None:
    """No block waits for a lease to run out."""
    rig = Rig()
    run = rig.start(rig.job(mode))
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.fail(InvalidRequest("no such stop token"))
    with pytest.raises(InvalidRequest, match="no such stop token"):
        await run.task
    assert isinstance(prefill.cancelled, InvalidRequest)
    await rig.nothing_is_held()


async def test_a_producer_lost_after_its_offer_gets_a_grace() -> None:
    """Decode may have landed already; where it says nothing, it is cut off with prefill's reason."""
    rig = Rig()
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    prefill.fail(PeerLost("prefill's daemon is gone"))
    with pytest.raises(PeerLost):
        await run.task
    assert isinstance(decode.cancelled, PeerLost)
    await rig.nothing_is_held()


async def test_decodes_word_on_prefill_waits_for_prefills_own() -> None:
    """WRITE: kvd tells decode of a dead producer before the proxy hears of it. The engine's death is the cause, which a
    request that may not fail a hand-over survives on another pair."""
    rig = Rig()
    run = rig.start(rig.job(Mode.WRITE, on_failure=OnFailure.FAIL))
    decode, prefill = await rig.legs.nth_decode(0), await rig.legs.nth_prefill(0)
    decode.fail(PeerLost("rank 0 is gone"))
    await decode.ended.wait()
    prefill.fail(EngineDied("killed"))
    with pytest.raises(EngineDied):
        await run.task
    await rig.nothing_is_held()


async def test_a_producer_lost_with_its_offer_never_reaches_decode() -> None:
    """Offered and lost in the same turn of the loop: decode is not opened for what is not there."""
    rig = Rig()
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    prefill.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await run.task
    assert rig.legs.decodes == []
    await rig.nothing_is_held()


async def test_a_producer_lost_after_the_landing_changes_nothing() -> None:
    """Tokens flow: the answer is completed."""
    rig = Rig(grace=0.0)
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens())
    await run.until(Delta)
    prefill.fail(EngineDied("gone"))
    await prefill.ended.wait()
    await rig.owner.idle()
    decode.say(tokens("b", Finish.STOP), done())
    decode.end()
    await run.task
    assert decode.cancelled is None
    await rig.nothing_is_held()


async def test_an_overdue_release_is_cut_off() -> None:
    """The producer's blocks come back though kvd never said so; the answer is not touched."""
    rig = Rig(release_timeout=0.01)
    run = rig.start(rig.job())
    prefill = await rig.legs.nth_prefill(0)
    prefill.say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens("a", Finish.STOP), done())
    decode.end()
    await run.task
    await prefill.ended.wait()
    assert isinstance(prefill.cancelled, TransferExpired)
    await rig.nothing_is_held()


async def test_legs_that_end_without_their_last_word_are_failures() -> None:
    """A service that closes its stream early is not taken for success."""
    rig = Rig()
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(0)).end()
    with pytest.raises(ProducerFailed, match="without an offer"):
        await run.task
    run = rig.start(rig.job())
    (await rig.legs.nth_prefill(1)).say(ready())
    decode = await rig.legs.nth_decode(0)
    decode.say(tokens())
    decode.end()
    with pytest.raises(ConsumerFailed, match="without finishing"):
        await run.task
    await rig.nothing_is_held()
