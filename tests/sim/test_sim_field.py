"""Failures that users of other prefill/decode systems reported and that nothing else here provokes; all of them are in
docs/field-failures.md. No deadline of kvd comes to help: what ends, ends because somebody ended it."""

import asyncio
import itertools

import pytest

from pdserve.kvd.testing import Fault
from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt

BLOCK = 16
FAST = 1e12
BOTH = pytest.mark.parametrize("mode", ["read", "write"])


@BOTH
async def test_whichever_copy_fails_the_request_ends(launch: Launch, prompt: Prompt, mode: str) -> None:
    """The first, the second and so on of the copies of one hand-over (two ranks, chunks, layers) fails: the request
    ends with that error at once, and both engines have their blocks again."""
    fleet = await launch(bandwidth=FAST, ranks=2, token_budget=64, prefix_cache=False)
    prefill, transfers = fleet.prefills[0], fleet.kvd.node.transfers.book.transfers
    chunk = fleet.sim.token_budget // BLOCK * fleet.sim.block_bytes * fleet.sim.layers * fleet.sim.ranks
    for number in itertools.count():
        tokens = prompt(150)
        fleet.faults.script[:] = [None] * number + [Fault.FAIL]
        if mode == "write":
            prefill.steps.shut()
        asked = asyncio.create_task(fleet.ask(tokens, mode=mode))
        if mode == "write":  # of the first chunk both ranks have copies of their own, however busy the machine is
            await fleet.until(lambda: any(transfer.consumers for transfer in transfers.values()))
            await prefill.steps.pass_one(fleet.sim.layers)
            await fleet.until(lambda asked=asked: asked.done() or fleet.landed() == chunk)  # type: ignore[misc]  # bound now
            prefill.steps.open()
        try:
            answer = await asked
        except errors.TransferFailed:
            await fleet.settled(5)
            continue
        # Layers that are ready together are one copy, so that a slow machine makes fewer of them.
        assert fleet.faults.script[-1:] == [Fault.FAIL], "a copy failed, and there is an answer all the same"
        assert answer.token_ids == await fleet.alone(tokens)
        break
    fleet.faults.script.clear()
    assert number >= (2 if mode == "read" else 4), "hardly a copy was struck"


@BOTH
async def test_decode_computes_nothing_before_the_last_copy(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Copies pass one after another; decode's first step comes after the last of them, whichever layer that is."""
    fleet = await launch(bandwidth=FAST, ranks=2, token_budget=64)
    decode, tokens, copies = fleet.decodes[0], prompt(150), 0
    fleet.link.shut()
    decode.steps.shut()
    stepped = asyncio.create_task(decode.steps.reached())
    asked = asyncio.create_task(fleet.ask(tokens, mode=mode))
    while True:
        copying = asyncio.create_task(fleet.link.reached())
        await asyncio.wait({stepped, copying}, return_when=asyncio.FIRST_COMPLETED)
        if not copying.done():
            copying.cancel()
            break
        await copying
        assert not stepped.done(), f"decode computes, and copy {copies} is still under way"
        await fleet.link.pass_one()
        copies += 1
    await stepped
    assert (fleet.copying(), fleet.ended().get("landed")) == (0, 1)
    assert copies >= 2
    decode.steps.open()
    assert (await asked).token_ids == await fleet.alone(tokens)


@BOTH
@pytest.mark.parametrize("length", [1, 2, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
async def test_a_prompt_of_a_block_or_two_in_chunks(launch: Launch, prompt: Prompt, mode: str, length: int) -> None:
    """A step computes half a block: chunks without any whole block of their own, and prompts without any."""
    fleet = await launch(token_budget=BLOCK // 2)
    tokens = prompt(length)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.mode, answer.recomputed_tokens, answer.fallbacks) == (mode, 0, 0)


@BOTH
async def test_several_answers_again_and_again(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Four answers to each prompt, in a pool that holds two prompts at prefill: every round gives all blocks back."""
    fleet = await launch(prefills=0, decodes=0, prefix_cache=False)
    prefill = await fleet.host("prefill", num_blocks=6)
    await fleet.host("decode", num_blocks=16)
    for _ in range(12):
        tokens = prompt(3 * BLOCK - 1)
        answer = await fleet.ask(tokens, mode=mode, n=4)
        assert {choice.token_ids for choice in answer.choices} == {await fleet.alone(tokens)}
        await fleet.settled(5)
        load = prefill.engine.load()
        assert load.free_kv_tokens == load.total_kv_tokens == 6 * BLOCK


@BOTH
async def test_a_prefix_is_used_again_while_it_is_computed(launch: Launch, prompt: Prompt, mode: str) -> None:
    """A second request comes while prefill is in the middle of a prompt with the same beginning; its copy of the
    shared blocks is taken when they are complete, and decode, which checks every byte, finds nothing wrong."""
    fleet = await launch(token_budget=4 * BLOCK, decodes=2)
    prefill, prefix = fleet.prefills[0], prompt(6 * BLOCK)
    first, second = prefix + prompt(10), prefix + prompt(20)
    prefill.steps.shut()
    asked = [asyncio.create_task(fleet.ask(first, mode=mode))]
    await prefill.steps.reached()
    asked.append(asyncio.create_task(fleet.ask(second, mode=mode)))
    await fleet.until(lambda: prefill.engine.load().running + prefill.engine.load().waiting == 2)
    prefill.steps.open()
    answers = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == [await fleet.alone(first), await fleet.alone(second)]
    assert answers[1].usage.cached_tokens == 4 * BLOCK, "what the first step computed, and it began in the second"


@BOTH
async def test_an_answer_that_ends_early_makes_room_for_a_hand_over(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Decode's pool holds one request: each answer stops at its first token, and the next request's KV goes into the
    blocks that are free by that. What is copied there is not written over by the answer that has ended."""
    fleet = await launch(prefills=0, decodes=0, prefix_cache=False, proxy={"admission_timeout": 50.0})
    await fleet.host("prefill")
    await fleet.host("decode", num_blocks=4)
    prompts = [prompt(3 * BLOCK + 1) for _ in range(12)]
    alone = [await fleet.alone(tokens) for tokens in prompts]
    jobs = [
        fleet.ask(tokens, mode=mode, stop_token_ids=[expected[0]])
        for tokens, expected in zip(prompts, alone, strict=True)
    ]
    answers = await asyncio.gather(*jobs)
    assert [answer.token_ids for answer in answers] == [expected[:1] for expected in alone]


@BOTH
async def test_noise_on_every_port(fleet: Fleet, prompt: Prompt, mode: str) -> None:
    """Whatever connects to a port of the proxy or of a service and speaks another protocol, or nothing, or hangs up
    in the middle: the next request is served by the same engines."""
    where = fleet.proxy.addresses
    ports = [where.grpc, where.http, where.registration]
    ports += [fleet.card(service).address for service in (*fleet.prefills, *fleet.decodes)]
    noise = [
        b"",
        b"\x00" * 1000,
        b"\xff" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
    ]
    silent = []
    for address, data in itertools.product(ports, noise):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        if data:
            writer.transport.abort()
        else:
            silent.append(writer)
    tokens = prompt(40)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.fallbacks, answer.prefill_engine_id) == (0, fleet.prefills[0].engine_id)
    for writer in silent:
        writer.close()
