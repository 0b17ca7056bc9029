"""Several proxies in front of the same engines. Each grants the whole of both pools to its own requests and knows
nothing of the others, so that credits protect nobody: what does not fit waits in the engines, and in WRITE the two
pools may wait for each other.

    front 0  [0][1] queue 2 3 ...  ─┐                       ┌─ decode's pool   holds two
    front 1  [0][1] queue 2 3 ...  ─┼─ 2, 10 times as much ─┤
    ...                            ─┘                       └─ prefill's pool  holds two
"""

import asyncio
import os
import random
from collections import Counter
from typing import Any

import grpc
import pytest

from pdserve.kvd.limits import Limits
from pdserve.rpc import errors
from pdserve.rpc.status import to_error
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.sim.hosted import Service
from tests.sim.services.legs import Legs

BLOCK = 16
BLOCKS = 8
"""Of each pool: two prompts of four blocks."""
FITS = 2
ANSWER = 24
"""Tokens; with a prompt more than the half of a pool."""
LIMITS = Limits(lease=300.0, accept=300.0, transfer=300.0, park=300.0, tie=0.03)
"""Nothing but a tie ends by itself."""


class Course:
    """In which order requests are sent to the engines, by any front, and end."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended: list[int] = []
        self.ties: Counter[int] = Counter()

    def send(self) -> int:
        """The number of a request that goes to the engines now."""
        self.sent += 1
        return self.sent

    def overtaken(self) -> dict[int, int]:
        """By how many that were sent after it each request was overtaken."""
        return {number: sum(later > number for later in self.ended[:at]) for at, number in enumerate(self.ended)}


class Front:
    """One proxy: at most as many requests at once as fit, first come first served, legs in a proxy's order. A request
    that a tie was broken at keeps its place and is tried again under another id."""

    def __init__(self, fleet: Fleet, legs: Legs, mode: str, rng: random.Random, course: Course) -> None:
        self._fleet = fleet
        self._legs = legs
        self._mode = mode
        self._rng = rng
        self._course = course
        self._credits = asyncio.Semaphore(FITS * len(fleet.prefills))

    async def ask(self, prompt: tuple[int, ...], most: int) -> None:
        """Checks the answer."""
        async with self._credits:
            number = self._course.send()
            while (answer := await self._try(prompt, most)) is None:
                self._course.ties[number] += 1
            self._course.ended.append(number)
        assert answer == list(await self._fleet.alone(prompt, most))

    async def _try(self, prompt: tuple[int, ...], most: int) -> list[int] | None:
        """None where both legs say that a tie was broken; anything else that is no answer fails the test."""
        tid = os.urandom(16)
        prefill, decode = self._rng.choice(self._fleet.prefills), self._rng.choice(self._fleet.decodes)
        reading: list[Any] = []
        if self._mode == "write":
            locator = self._fleet.card(prefill).locator
            taken = await self._legs.decode(decode, tid, prompt, locator=locator, max_tokens=most)
            given = await self._give(prefill, decode, tid, prompt)
        else:
            given = await self._give(prefill, decode, tid, prompt)
            ticket = (await given.read()).ready.ticket
            taken = await self._legs.decode(decode, tid, prompt, ticket=ticket, max_tokens=most)
        reading += [self._legs.tokens(taken), self._legs.released(given)]
        ended: list[Any] = await asyncio.gather(*reading, return_exceptions=True)
        if not any(isinstance(each, BaseException) for each in ended):
            return list(ended[0])
        reasons = [type(to_error(each)) if isinstance(each, grpc.aio.AioRpcError) else each for each in ended]
        assert reasons == [errors.TieBroken, errors.TieBroken], reasons
        return None

    async def _give(self, prefill: Service, decode: Service, tid: bytes, prompt: tuple[int, ...]) -> Any:
        peer = self._fleet.card(decode).locator
        return await self._legs.prefill(prefill, tid, prompt, self._mode, peer_locator=peer)


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("fronts", [2, 10])
@pytest.mark.parametrize("pairs", [1, 2])
async def test_past_the_credits_all_end(
    launch: Launch, rng: random.Random, prompt: Prompt, pairs: int, fronts: int, mode: str
) -> None:
    """Answers that outgrow decode's pool, several fronts, one pair or two that are mixed at random: every request is
    answered. For each time that it is tried, and on each pair, at most as many that were sent later are before it as
    all fronts have under way at once. A READ knows no ties, since decode takes nothing that is not on offer."""
    fleet = await launch(prefills=pairs, decodes=pairs, limits=LIMITS, num_blocks=BLOCKS, token_budget=32)
    course = Course()
    all_fronts = [Front(fleet, Legs(fleet), mode, rng, course) for _ in range(fronts)]
    asked = [
        front.ask(prompt(rng.randrange(3 * BLOCK, 4 * BLOCK)), ANSWER)
        for _ in range(60 // fronts)
        for front in all_fronts
    ]
    await asyncio.wait_for(asyncio.gather(*asked), 50)
    await fleet.settled()
    ties, overtaken, under_way = course.ties, course.overtaken(), fronts * FITS * pairs
    lost = [service.engine.preemptions for service in fleet.decodes]
    print(
        f"{mode}, {fronts} fronts, {pairs} pairs: {ties.total()} ties, at most {max(ties.values(), default=0)} of one"
    )
    print(f"{max(overtaken.values())} overtook one, {under_way} under way; {lost} preempted")
    assert set(fleet.ended()) - {"TIE_BROKEN"} == {"landed", "released"}
    assert not ties or mode == "write"
    assert sum(lost) > 0
    assert {number: by for number, by in overtaken.items() if by > under_way * pairs * (1 + ties[number])} == {}


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_what_can_never_fit_is_refused_by_the_service(
    launch: Launch, prompt: Prompt, side: str, mode: str
) -> None:
    """One block more than one side's pool has: that service refuses at its door, before a step of its engine; the other
    leg hears of it at once and holds nothing."""
    fleet = await launch(prefills=0, decodes=0, limits=LIMITS)
    prefill = await fleet.host("prefill", num_blocks=4 if side == "prefill" else 8)
    decode = await fleet.host("decode", num_blocks=4 if side == "decode" else 8)
    legs, tid, tokens = Legs(fleet), os.urandom(16), prompt(4 * BLOCK + 1)
    if mode == "write":
        taken = await legs.decode(decode, tid, tokens)
        given = await legs.prefill(prefill, tid, tokens, mode)
    else:
        given = await legs.prefill(prefill, tid, tokens, mode)
        taken = None
        if side == "decode":
            taken = await legs.decode(decode, tid, tokens, ticket=(await given.read()).ready.ticket)
    refuses, hears = (given, taken) if side == "prefill" else (taken, given)
    refused = await fleet.refusal(refuses)
    assert type(refused) is errors.PoolExceeded
    assert (refused.metadata["needed"], refused.metadata["pool"]) == ("5", "4")
    if hears is not None:
        other = errors.ProducerFailed if side == "prefill" else errors.ConsumerFailed
        assert type(await fleet.refusal(hears)) is other
    assert (prefill if side == "prefill" else decode).engine.load().steps == 0
    await fleet.settled()
