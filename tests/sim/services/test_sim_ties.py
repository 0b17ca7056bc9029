"""Two full pools that wait for each other: legs that reach the services in opposite orders, past the
proxy's admission, which would not let them.

    prefill's pool  [0 offered][1 offered]   queue 2 3 4 ... 99
    decode's pool   [99 waits ][98 waits ]   queue 97 ... 1 0
"""

import asyncio
import os
from typing import Any

import grpc
import pytest

from pdserve.kvd.limits import Limits
from pdserve.rpc import errors
from pdserve.rpc.status import to_error
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.sim.services.legs import Legs

TOKENS = 60  # 4 blocks, which hold the answer too
REQUESTS = 100
LIMITS = Limits(accept=1.5, park=2.5, tie=0.03)  # a hundred ties take longer than an offer may wait


class Caller:
    """Plays the proxy, but for its order."""

    def __init__(self, fleet: Fleet, legs: Legs, mode: str) -> None:
        self._fleet = fleet
        self._legs = legs
        self._mode = mode
        self.ties = 0

    async def all(self, prompts: list[tuple[int, ...]]) -> list[list[int]]:
        """Opens all prefill legs in order and all decode legs in reverse; the answers, in order."""
        ids = [os.urandom(16) for _ in prompts]
        pairs = list(zip(ids, prompts, strict=True))
        prefills = [await self._prefill(tid, prompt) for tid, prompt in pairs]
        decodes = [await self._decode(tid, prompt) for tid, prompt in reversed(pairs)]
        legs = zip(prompts, prefills, reversed(decodes), strict=True)
        return await asyncio.gather(*(self._until_answered(*each) for each in legs))

    async def _until_answered(self, prompt: tuple[int, ...], prefill: Any, decode: Any) -> list[int]:
        """Tries again whenever a tie was broken at this request's cost."""
        while (answer := await self._answer(prefill, decode)) is None:
            self.ties += 1
            tid = os.urandom(16)
            prefill, decode = await self._prefill(tid, prompt), await self._decode(tid, prompt)
        return answer

    async def _answer(self, prefill: Any, decode: Any) -> list[int] | None:
        """What decode says, None where both legs say that a tie was broken; anything else fails the test."""
        legs: list[Any] = [self._legs.released(prefill), self._legs.tokens(decode)]
        ended: list[Any] = await asyncio.gather(*legs, return_exceptions=True)
        if not any(isinstance(each, BaseException) for each in ended):
            return list(ended[1])
        reasons = [type(to_error(each)) if isinstance(each, grpc.aio.AioRpcError) else each for each in ended]
        assert reasons == [errors.TieBroken, errors.TieBroken], reasons
        return None

    async def _prefill(self, tid: bytes, prompt: tuple[int, ...]) -> Any:
        """A prefill leg."""
        return await self._legs.prefill(self._fleet.prefills[0], tid, prompt, self._mode)

    async def _decode(self, tid: bytes, prompt: tuple[int, ...]) -> Any:
        """A decode leg; of a READ, with a ticket for an offer that is still to come."""
        parts = self._fleet.prefills[0].parts
        ticket = parts.peers.our_ticket(tid, TOKENS, 4, parts.clock.unix() + 60) if self._mode == "read" else b""
        return await self._legs.decode(self._fleet.decodes[0], tid, prompt, ticket=ticket)


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_opposite_orders_all_end(launch: Launch, prompt: Prompt, mode: str) -> None:
    """A hundred requests, pools of two prompts: every one is answered; ties are broken, each at the cost of one
    request that both legs hear of, and none ends by a time to live."""
    fleet = await launch(limits=LIMITS, num_blocks=8, prefix_cache=False)
    caller = Caller(fleet, Legs(fleet), mode)
    prompts = [prompt(TOKENS) for _ in range(REQUESTS)]
    answers = await asyncio.wait_for(caller.all(prompts), 50)
    assert answers == [list(await fleet.alone(tokens, 4)) for tokens in prompts]
    await fleet.settled()
    assert caller.ties > 0
    assert set(fleet.ended()) == {"landed", "released", "TIE_BROKEN"}
    print(f"{mode}: {caller.ties} ties broken")
