"""The queue: first come first served, bounded, and nothing leaks when a waiter gives up."""

import asyncio
import time

import pytest

from pdserve.proxy.admission import Admission, Claim
from pdserve.proxy.credits import Ledger
from pdserve.proxy.registry import Registry
from pdserve.proxy.routing import Need
from pdserve.proxy.types import Route
from pdserve.rpc.errors import DeadlinePassed, Draining, NoEngines, Overloaded
from pdserve.runtime.beats import Beat

FAR = time.monotonic() + 3600


class Rig:
    """One prefill and one decode engine of 160 tokens each."""

    def __init__(self, length: int = 8, timeout: float = 30.0) -> None:
        self.registry = Registry()
        self.ledger = Ledger()
        self.admission = Admission(self.registry, self.ledger, time.monotonic, length=length, timeout=timeout)
        self.numbers = iter(range(1, 100))
        for engine_id in ("p", "d"):
            self.beat(engine_id)

    def beat(self, engine_id: str, state: str = "ready", role: str = "", total: int = 160) -> None:
        """Registers an engine, or changes its state."""
        beat = Beat(
            type="D",
            http_address="h",
            zmq_address="",
            dp_size=1,
            tp_size=1,
            transfer_mode="READ",
            engine_id=engine_id,
            grpc_address=engine_id,
            locator=b"",
            model="m",
            tokenizer="bytes",
            role=role or {"p": "prefill", "d": "decode"}[engine_id[0]],  # type: ignore[arg-type]  # one of the roles
            identity={},
            max_model_len=1000,
            block_size=16,
            total_kv_tokens=total,
            free_kv_tokens=total,
            running=0,
            waiting=0,
            steps=0,
            state=state,  # type: ignore[arg-type]  # one of the states
            beat=next(self.numbers),
            sent_at=0.0,
        )
        self.registry.beat(beat, time.monotonic())
        entry = self.registry.get(engine_id)
        if entry is not None:
            self.ledger.joined(entry.card)
            self.registry.channel_ready(engine_id)
        self.admission.pump()

    def claim(self, prompt: int, route: Route = Route.SPLIT, exclude: tuple[str, ...] = ()) -> Claim:
        """A claim for a prompt and one token."""
        return Claim("m", Need(prompt, 1), route, frozenset(exclude))

    def held(self) -> int:
        """Tokens on both engines."""
        return self.ledger.reserved("p") + self.ledger.reserved("d")


async def waiting(rig: Rig, count: int) -> None:
    """Lets tasks run until this many wait."""
    for _ in range(100):
        if len(rig.admission) == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{len(rig.admission)} wait, not {count}")


async def test_a_grant_holds_both_sides_and_gives_both_back() -> None:
    """Prefill and decode are reserved together, and released each on its own, once."""
    rig = Rig()
    grant = await rig.admission.admit(rig.claim(80), FAR)
    assert rig.held() == 160
    grant.release_prefill()
    grant.release_prefill()
    assert rig.held() == 80
    grant.release_decode()
    assert rig.held() == 0


async def test_first_come_first_served() -> None:
    """A short prompt does not overtake a long one that waits: the long one would starve."""
    rig = Rig()
    first = await rig.admission.admit(rig.claim(64), FAR)
    order: list[str] = []

    async def wait(name: str, prompt: int) -> None:
        await rig.admission.admit(rig.claim(prompt), FAR)
        order.append(name)

    tasks = [asyncio.create_task(wait("long", 112))]
    await waiting(rig, 1)
    tasks.append(asyncio.create_task(wait("short", 16)))
    await waiting(rig, 2)
    assert order == []
    first.release_prefill()
    assert len(rig.admission) == 2, "decode's side is still held"
    first.release_decode()
    await asyncio.gather(*tasks)
    assert order == ["long", "short"]


async def test_another_route_is_not_held_up() -> None:
    """A waiter keeps only engines that it can use."""
    rig = Rig()
    rig.beat("b", role="both")
    await rig.admission.admit(rig.claim(150), FAR)
    task = asyncio.create_task(rig.admission.admit(rig.claim(16), FAR))
    await waiting(rig, 1)
    grant = await rig.admission.admit(rig.claim(16, Route.COLOCATED), FAR)
    assert grant.choice.decode.engine_id == "b"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_full_queue_refuses() -> None:
    """OVERLOADED at once; a request that is tried again is let in, at the front."""
    rig = Rig(length=1)
    held = await rig.admission.admit(rig.claim(150), FAR)
    first = asyncio.create_task(rig.admission.admit(rig.claim(150), FAR))
    await waiting(rig, 1)
    with pytest.raises(Overloaded, match="1 requests wait already"):
        await rig.admission.admit(rig.claim(16), FAR)
    again = asyncio.create_task(rig.admission.admit(rig.claim(150), FAR, again=True))
    await waiting(rig, 2)
    held.release_prefill()
    held.release_decode()
    grant = await again
    assert not first.done()
    grant.release_prefill()
    grant.release_decode()
    await first


async def test_the_queue_has_a_deadline() -> None:
    """OVERLOADED after the queue's own timeout, DEADLINE_EXCEEDED where the request's comes first."""
    rig = Rig(timeout=0.02)
    await rig.admission.admit(rig.claim(150), FAR)
    with pytest.raises(Overloaded, match=r"no engine had room for 16 prompt tokens within 0\.02 s"):
        await rig.admission.admit(rig.claim(16), FAR)
    with pytest.raises(DeadlinePassed):
        await rig.admission.admit(rig.claim(16), time.monotonic() + 0.005)
    assert len(rig.admission) == 0


async def test_who_gives_up_makes_room_for_those_behind() -> None:
    """A cancelled waiter no longer keeps engines from others."""
    rig = Rig()
    await rig.admission.admit(rig.claim(96), FAR)
    long = asyncio.create_task(rig.admission.admit(rig.claim(150), FAR))
    await waiting(rig, 1)
    short = asyncio.create_task(rig.admission.admit(rig.claim(16), FAR))
    await waiting(rig, 2)
    long.cancel()
    grant = await short
    assert grant.decode.tokens == 16


async def test_a_grant_that_meets_the_end_of_its_wait_is_not_lost() -> None:
    """A waiter gives up, and the one behind it gets the place in the turn of the loop in which its own time is over, as
    on a busy machine: it has the place, and nothing is reserved for nobody."""
    rig, loop = Rig(), asyncio.get_running_loop()
    first = await rig.admission.admit(rig.claim(96), FAR)
    at = time.monotonic() + 0.05
    long = asyncio.create_task(rig.admission.admit(rig.claim(150), at))
    await waiting(rig, 1)
    short = asyncio.create_task(rig.admission.admit(rig.claim(16), at + 0.1))
    await waiting(rig, 2)
    loop.call_at(at + 0.001, time.sleep, 0.2)  # behind the end of the first one's time, before it has heard of that
    time.sleep(max(at + 0.002 - time.monotonic(), 0.0))  # noqa: ASYNC251 - so that both come in one turn
    with pytest.raises(DeadlinePassed):
        await long
    for grant in (first, await short):
        grant.release_prefill()
        grant.release_decode()
    assert rig.held() == 0


async def test_a_grant_that_meets_a_cancellation_comes_back() -> None:
    """Granted and cancelled in the same turn of the loop: nothing stays reserved."""
    rig = Rig()
    first = await rig.admission.admit(rig.claim(144), FAR)
    task = asyncio.create_task(rig.admission.admit(rig.claim(144), FAR))
    await waiting(rig, 1)
    first.release_prefill()
    first.release_decode()
    assert rig.held() == 288, "granted to the waiter"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert rig.held() == 0


async def test_waiters_hear_when_their_engines_leave() -> None:
    """No pair is left: NO_ENGINES at once, not after the queue's timeout."""
    rig = Rig()
    await rig.admission.admit(rig.claim(150), FAR)
    task = asyncio.create_task(rig.admission.admit(rig.claim(16), FAR))
    await waiting(rig, 1)
    rig.beat("d", state="draining")
    with pytest.raises(NoEngines, match="1 prefill, 0 decode"):
        await task


async def test_impossible_claims_are_refused_at_once() -> None:
    """No pair, no pair left, or too long for all that are left."""
    rig = Rig()
    with pytest.raises(NoEngines, match="no colocated"):
        await rig.admission.admit(rig.claim(16, Route.COLOCATED), FAR)
    with pytest.raises(NoEngines, match="0 prefill"):
        await rig.admission.admit(rig.claim(16, exclude=("p",)), FAR)
    with pytest.raises(NoEngines, match="can hold"):
        await rig.admission.admit(rig.claim(161), FAR)
    with pytest.raises(NoEngines, match="no decode engine is left"):
        await rig.admission.admit(Claim("m", Need(16, 1), Route.SPLIT, frozenset({"d"}), decode_only=True), FAR)


async def test_draining_takes_nothing_new_and_keeps_what_waits() -> None:
    """After `close` new requests are refused; a waiter still gets its turn."""
    rig = Rig()
    first = await rig.admission.admit(rig.claim(150), FAR)
    task = asyncio.create_task(rig.admission.admit(rig.claim(16), FAR))
    await waiting(rig, 1)
    rig.admission.close()
    with pytest.raises(Draining):
        await rig.admission.admit(rig.claim(16), FAR)
    first.release_prefill()
    first.release_decode()
    await task
