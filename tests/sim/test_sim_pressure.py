"""Pools far too small for what is asked of them: everything ends, in bounded time, with the right tokens, and what can
never fit is refused before anything is computed.

    prefill's pool  [offered, decode is slow][computing, preempted]      queue: credits at the proxy
    decode's pool   [waits for its KV][answer outgrows its reservation]  queue: FIFO in the engine

*Bounded* is said in requests and not in seconds: how many that were asked later may end earlier (`Order`).
Past the proxy's credits: services/test_sim_two_proxies.py.
"""

import asyncio
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from pdserve.costmodel import CostModel
from pdserve.kvd.limits import Limits
from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.sim.hosted import Service

BLOCK = 16
ANSWER = 16
TIES = Limits(lease=300.0, accept=300.0, transfer=300.0, park=300.0, tie=0.05)
"""Ties are broken soon, so that one which is none would be seen; nothing else ends by itself."""
PATIENT = {"admission_timeout": 50.0}


class Order:
    """In which order requests end that were asked one after another."""

    def __init__(self) -> None:
        self._ended: list[int] = []

    def __len__(self) -> int:
        return len(self._ended)

    def end(self, number: int) -> None:
        """Request `number`, counted as they were asked, has its whole answer."""
        self._ended.append(number)

    def most_overtaken(self) -> int:
        """By how many later ones the unluckiest request was overtaken."""
        ended = enumerate(self._ended)
        return max(sum(later > number for later in self._ended[:place]) for place, number in ended)


def at_proxy(fleet: Fleet) -> int:
    """Requests that wait or run there."""
    topology = fleet.proxy.inference.topology()
    return topology.queued + topology.in_flight


async def ask_all(
    fleet: Fleet, prompts: Sequence[tuple[int, ...]], answer: int, *, hold: Iterable[Service] = (), **fields: Any
) -> Order:
    """Asks for all, one after another, and checks every token of every answer; none needs a second try. The steps of
    the engines in `hold` begin when all have been asked."""
    order, before = Order(), at_proxy(fleet)

    async def one(number: int, tokens: tuple[int, ...]) -> None:
        got = await fleet.ask(tokens, max_tokens=answer, **fields)
        order.end(number)
        assert got.token_ids == await fleet.alone(tokens, answer)
        assert got.fallbacks == 0

    def arrived(number: int) -> bool:
        return at_proxy(fleet) + len(order) - before > number

    held = list(hold)
    for service in held:
        service.steps.shut()
    async with asyncio.timeout(50), asyncio.TaskGroup() as asking:
        for number, tokens in enumerate(prompts):
            asking.create_task(one(number, tokens))
            await fleet.until(functools.partial(arrived, number))
        for service in held:
            service.steps.open()
    return order


def preemptions(fleet: Fleet) -> tuple[int, int]:
    """At prefill and at decode."""
    prefill, decode = (sum(s.engine.preemptions for s in side) for side in (fleet.prefills, fleet.decodes))
    return prefill, decode


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("times", [2, 10])
async def test_more_than_fits_at_once(
    launch: Launch, rng: random.Random, prompt: Prompt, times: int, mode: str
) -> None:
    """Decode holds four of the requests at once, and is asked for 2 and 10 times as many, a long one that fills either
    pool among them: no preemption, since credits cover whole answers, and none is overtaken by more than what
    is under way with it."""
    fits = 4
    fleet = await launch(prefills=0, decodes=0, proxy=PATIENT, limits=TIES)
    prefill = await fleet.host("prefill", num_blocks=4 * fits, token_budget=64)
    decode = await fleet.host("decode", num_blocks=4 * fits)
    prompts = [prompt(rng.randrange(33, 48)) for _ in range(times * fits)]
    prompts[fits] = prompt(10 * BLOCK)
    order = await ask_all(fleet, prompts, ANSWER, mode=mode, hold=(prefill, decode))
    await fleet.settled()
    print(f"{mode} {times}x: {order.most_overtaken()} overtook")
    assert order.most_overtaken() <= fits
    assert preemptions(fleet) == (0, 0)
    assert set(fleet.ended()) == {"landed", "released"}


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_several_answers_that_do_not_fit_at_once(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Three answers to each prompt, and a decode pool of one and a half: they are taken over one after another, while
    prefill holds the prompt for the last of them."""
    fleet = await launch(prefills=0, decodes=0, proxy=PATIENT, limits=TIES)
    await fleet.host("prefill", num_blocks=8)
    await fleet.host("decode", num_blocks=6, prefix_cache=False)

    async def one(tokens: tuple[int, ...]) -> None:
        got = await fleet.ask(tokens, n=3, max_tokens=ANSWER, mode=mode)
        assert [choice.token_ids for choice in got.choices] == [await fleet.alone(tokens, ANSWER)] * 3

    await asyncio.wait_for(asyncio.gather(*(one(prompt(40)) for _ in range(8))), 50)
    await fleet.settled()
    assert fleet.ended() == {"landed": 24, "released": 8}


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_prefill_fills_while_decode_stands_still(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Decode's step does not end: prefill's pool fills with offers that nobody takes, what comes then waits at the
    proxy for credits, and that is no tie. Once decode goes on, all are answered."""
    fleet = await launch(prefills=0, decodes=0, proxy=PATIENT, limits=TIES)
    prefill = await fleet.host("prefill", num_blocks=6)
    decode = await fleet.host("decode", num_blocks=40)
    decode.steps.shut()
    held, prompts = prompt(20), [prompt(40) for _ in range(10)]
    first = asyncio.create_task(ask_all(fleet, [held], ANSWER, mode=mode))
    await decode.steps.reached()
    asked = asyncio.create_task(ask_all(fleet, prompts, ANSWER, mode=mode))
    await fleet.until(lambda: fleet.producers().count("complete") == 2)
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 8)
    assert prefill.engine.load().free_kv_tokens < 3 * BLOCK
    await asyncio.sleep(3 * TIES.tie)
    assert set(fleet.ended()) == {"landed", "released"}
    decode.steps.open()
    assert (await asked).most_overtaken() <= 4
    await first
    await fleet.settled()
    assert fleet.ended() == {"landed": 11, "released": 11}


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_both_sides_preempt(launch: Launch, rng: random.Random, prompt: Prompt, mode: str) -> None:
    """Answers outgrow decode's pool, and the prefill engine's own traffic takes blocks of prompts that are being
    computed, at the same time: tokens and bytes are right, and nobody is overtaken by more than twice what decode
    holds at once.

    The first prompt and one block of another request fill prefill's pool, and the other's second block comes two chunks
    later; the first two prompts are at decode together and leave two blocks for their answers, which need six.
    """
    fleet = await launch(
        prefills=0, decodes=0, prefix_cache=False, limits=TIES, proxy={"admission_headroom": 0} | PATIENT
    )
    prefill = await fleet.host("prefill", num_blocks=17, token_budget=64)
    decode = await fleet.host("decode", num_blocks=34)
    prompts = [prompt(16 * BLOCK) for _ in range(2)] + [prompt(rng.randrange(160, 257)) for _ in range(14)]
    for service in (prefill, decode):
        service.steps.shut()
    beside = asyncio.create_task(fleet.local(prefill, prompt(13), 40))
    await prefill.steps.pass_one()
    asked = asyncio.create_task(ask_all(fleet, prompts, 40, mode=mode))
    await fleet.until(lambda: at_proxy(fleet) == len(prompts))
    prefill.steps.open()
    await decode.steps.reached()
    await fleet.until(lambda: decode.engine.load().waiting > 0)
    await decode.steps.pass_one()
    await fleet.until(lambda: fleet.ended().get("landed") == 2)
    decode.steps.open()
    await beside
    while not asked.done():
        await asyncio.wait_for(fleet.local(prefill, prompt(13), 40), 50)
    order = await asked
    await fleet.settled()
    fences = fleet.kvd.node.transfers.book.fences.count
    print(f"{mode}: preempted {preemptions(fleet)}, {fences} fenced, {order.most_overtaken()} overtook")
    assert min(preemptions(fleet)) > 0
    assert fences > 0 or mode == "read", "no producer lost blocks that kvd knew of"
    assert order.most_overtaken() <= 2 * 3
    assert set(fleet.ended()) == {"landed", "released"}


SHORT = Limits(lease=1.0, accept=1.0, transfer=300.0, park=1.0, tie=300.0)
"""What waits in an engine's queue waits longer than each of these."""


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_a_hand_over_waits_as_long_as_its_request_is_wanted(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Eight at once outgrow what the proxy reserved for their answers, so that some stand in decode's queue, and in
    WRITE in prefill's, for longer than kvd's deadlines: none of them expires, none is tried again."""
    fleet = await launch(
        prefills=0, decodes=0, limits=SHORT, prefix_cache=False, proxy={"admission_headroom": 0} | PATIENT
    )
    await fleet.host("prefill", num_blocks=64)
    await fleet.host("decode", num_blocks=24, cost=CostModel(decode_base=0.01))
    await ask_all(fleet, [prompt(4 * BLOCK) for _ in range(8)], 100, mode=mode)
    await fleet.settled()
    assert set(fleet.ended()) == {"landed", "released"}


POOLS = [(4, 8, "prefill"), (8, 4, "decode"), (4, 4, "decode")]


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize(("prefill", "decode", "side"), POOLS, ids=["prefill", "decode", "both"])
async def test_what_can_never_fit_is_refused_beside_a_full_queue(
    launch: Launch, prompt: Prompt, prefill: int, decode: int, side: str, mode: str
) -> None:
    """One block more than a pool has: PROMPT_EXCEEDS_POOL before any step of an engine, also while others wait for
    credits, in front of whom it does not wait. What just fits both is answered."""
    fleet = await launch(prefills=0, decodes=0, proxy=PATIENT)
    for role, blocks in (("prefill", prefill), ("decode", decode)):
        await fleet.host(role, num_blocks=blocks, prefix_cache=False)
    services = (*fleet.prefills, *fleet.decodes)

    def known() -> tuple[dict[str, int], list[int]]:
        return fleet.reserved(), [len(service.parts.calls) for service in services]

    async def refused(tokens: int, most: int) -> None:
        before = known()
        with pytest.raises(errors.PoolExceeded) as raised:
            await fleet.ask(prompt(tokens), mode=mode, max_tokens=most)
        assert raised.value.metadata["side"] == side
        assert known() == before, "an engine has heard of it"

    await refused(4 * BLOCK + 1, 1)
    assert [service.engine.load().steps for service in services] == [0, 0]
    assert not fleet.held()
    for service in services:
        service.steps.shut()
    just = [prompt(4 * BLOCK - 1 if side == "decode" else 4 * BLOCK) for _ in range(3)]
    asked = asyncio.create_task(ask_all(fleet, just, 1, mode=mode))
    await fleet.until(lambda: fleet.proxy.inference.topology().queued == 2)
    await refused(4 * BLOCK + 1, 1)
    if side == "decode":
        await refused(4 * BLOCK, 1)
    for service in services:
        service.steps.open()
    await asked
