"""The one slot of measurements and loans, and work that is never left half done."""

import asyncio

import pytest

from pdserve.kvd.probing.slot import Slot, whole
from pdserve.rpc.errors import Overloaded, TransferFailed, Unavailable


async def test_work_that_must_be_whole_outlasts_every_cancel() -> None:
    """Memory is unmapped only when the copies into it have ended: a second cancel does not cut that wait short."""
    begun, let, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def close() -> None:
        begun.set()
        await let.wait()
        done.set()

    caller = asyncio.create_task(whole(close()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()


async def test_what_it_returns_or_raises_is_the_works() -> None:
    """Where nobody cancels."""

    async def fails() -> int:
        raise TransferFailed("no")

    assert await whole(asyncio.sleep(0, 5)) == 5
    with pytest.raises(TransferFailed):
        await whole(fails())


async def test_one_at_a_time_and_none_once_it_closes() -> None:
    """The slot is free again when the work has ended, however; closing ends what is under way and waits for it."""
    slot, let, ended = Slot(lambda error: pytest.fail(repr(error))), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await let.wait()
        finally:
            await whole(asyncio.sleep(0.01))
            ended.set()

    async def fails() -> None:
        raise TransferFailed("no room")

    first = slot.take("measures", work)
    with pytest.raises(Overloaded, match="this kvd measures"):
        slot.take("lends", work)
    let.set()
    await first
    await asyncio.wait([slot.take("lends", fails)])  # whoever asked is told; it is no defect
    ended.clear()
    let.clear()
    slot.take("measures", work)
    await asyncio.sleep(0)
    await slot.aclose()
    assert ended.is_set()
    with pytest.raises(Unavailable):
        slot.take("measures", work)
    await slot.aclose()


async def test_an_error_that_only_a_defect_explains_is_told() -> None:
    """Also where nobody waits for the work any more."""
    defects: list[BaseException] = []

    async def broken() -> None:
        raise RuntimeError("impossible")

    slot = Slot(defects.append)
    await asyncio.wait([slot.take("measures", broken)])
    await asyncio.sleep(0)
    assert [str(error) for error in defects] == ["impossible"]
