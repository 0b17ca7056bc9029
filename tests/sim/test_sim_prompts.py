"""Prompts of every length round a block's edge and answers of every shape: what one engine alone would say."""

import pytest

from pdserve.client import Completion
from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt

BLOCK, LAYERS, BLOCK_BYTES = 16, 4, 128  # SimConfig's own


def handed_over(answer: Completion, tokens: int, *, mode: str, n: int = 1, ranks: int = 1) -> None:
    """The whole prompt's blocks were moved n times on every rank, and nothing was computed twice."""
    blocks = n * -(-tokens // BLOCK)
    facts = answer.transfer
    assert facts is not None
    assert (answer.mode, answer.recomputed_tokens, answer.fallbacks) == (mode, 0, 0)
    assert (facts.blocks, facts.layers, facts.ranks) == (blocks, LAYERS, ranks)
    assert facts.kv_bytes == blocks * LAYERS * BLOCK_BYTES * ranks
    assert answer.usage.prompt_tokens == tokens
    timings = answer.timings
    assert sum(timings.parts.values()) + timings.unattributed_seconds == pytest.approx(timings.ttft_seconds)
    assert "kv.wait" in timings.parts


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 150])
async def test_an_answer_is_that_of_one_engine(fleet: Fleet, prompt: Prompt, mode: str, length: int) -> None:
    """Token for token; KV bytes are layers x blocks x bytes of a block."""
    tokens = prompt(length)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    handed_over(answer, length, mode=mode)
    assert answer.prefill_engine_id == fleet.prefills[0].engine_id
    assert answer.decode_engine_id == fleet.decodes[0].engine_id
    assert answer.transport == "shm"


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("length", [33, 150, 160])
async def test_a_prompt_in_chunks(launch: Launch, prompt: Prompt, mode: str, length: int) -> None:
    """A budget of 24 tokens a step cuts blocks in two; whole blocks are pushed, and the rest with the last."""
    fleet = await launch(token_budget=24)
    tokens = prompt(length)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    handed_over(answer, length, mode=mode)


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_two_ranks(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Each rank's region is handed over; the answer waits for both."""
    fleet = await launch(ranks=2, token_budget=64)
    tokens = prompt(150)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    handed_over(answer, 150, mode=mode, ranks=2)


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_several_answers_to_one_prompt(fleet: Fleet, prompt: Prompt, mode: str) -> None:
    """n consumers of one prefill; each answer has its own seed, and is what one engine says to that seed."""
    tokens = prompt(70)
    answer = await fleet.ask(tokens, mode=mode, n=3, seed=11, temperature=1.0)
    expected = [await fleet.alone(tokens, temperature=1.0, seed=11 + index) for index in range(3)]
    assert [choice.token_ids for choice in answer.choices] == expected
    assert len(set(expected)) == 3
    handed_over(answer, 70, mode=mode, n=3)
    assert answer.usage.completion_tokens == 24
    assert fleet.ended() == {"landed": 3, "released": 1}


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_shortest_answers(fleet: Fleet, prompt: Prompt, mode: str, max_tokens: int) -> None:
    """One token is decode's own, not the one that prefill sampled."""
    tokens = prompt(40)
    answer = await fleet.ask(tokens, mode=mode, max_tokens=max_tokens)
    assert answer.token_ids == await fleet.alone(tokens, max_tokens)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_stops_are_decodes_business(fleet: Fleet, prompt: Prompt, mode: str) -> None:
    """A stop that the first token meets ends the answer, never the prefill; a later one cuts the text."""
    tokens = prompt(40)
    whole = await fleet.alone(tokens, 12)
    text = bytes(whole).decode()
    first = await fleet.ask(tokens, mode=mode, max_tokens=12, stop_token_ids=[whole[0]])
    assert (first.token_ids, first.choices[0].stop_reason) == (whole[:1], str(whole[0]))
    cut = await fleet.ask(tokens, mode=mode, max_tokens=12, stop=[text[6:8]])
    assert (cut.text, cut.choices[0].finish_reason, cut.choices[0].stop_reason) == (text[:6], "stop", text[6:8])
    later = await fleet.ask(tokens, mode=mode, max_tokens=12, min_tokens=5, stop_token_ids=[whole[0]])
    assert later.token_ids[:5] == whole[:5]
    assert fleet.ended() == {"landed": 3, "released": 3}


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_an_answer_that_ends_by_itself(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Where the model says its end of sequence, decode stops and prefill does not; unless asked to ignore it."""
    fleet = await launch(eos_every=1)
    tokens = prompt(40)
    answer = await fleet.ask(tokens, mode=mode)
    assert (answer.token_ids, answer.text) == ((257,), "")
    assert answer.choices[0].finish_reason == "stop"
    ignoring = await fleet.ask(tokens, mode=mode, ignore_eos=True)
    assert ignoring.token_ids == await fleet.alone(tokens, ignore_eos=True)


async def test_both_faces_say_the_same(fleet: Fleet) -> None:
    """A chat over gRPC, over HTTP, and over HTTP as a stream: one text, one usage."""
    messages = [{"role": "user", "content": "what is a block?"}]
    spoken = await fleet.client.chat(messages, max_tokens=8, temperature=0.0, logprobs=2)
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    status, whole = await fleet.post(body, "/v1/chat/completions")
    assert status == 200
    assert whole["choices"][0]["message"]["content"] == spoken.text
    assert whole["usage"]["prompt_tokens"] == spoken.usage.prompt_tokens
    assert whole["pdserve"]["transfer"]["kv_bytes"] > 0
    async with fleet.http.post("/v1/chat/completions", json=body | {"stream": True}) as response:
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    assert len(lines) == 9
    assert [len(position.top) for position in spoken.choices[0].logprobs] == [2] * 8


async def test_a_colocated_engine_only_by_policy(launch: Launch, prompt: Prompt) -> None:
    """An engine of role both never stands in for a missing pair unless the request allows it."""
    fleet = await launch(prefills=0, decodes=1)
    both = await fleet.host("both", kvd=False)
    tokens = prompt(40)
    with pytest.raises(errors.NoEngines):
        await fleet.ask(tokens)
    for route in ("split_or_colocated", "colocated"):
        answer = await fleet.ask(tokens, route=route)
        assert answer.token_ids == await fleet.alone(tokens)
        assert (answer.decode_engine_id, answer.prefill_engine_id) == (both.engine_id, "")
        assert (answer.mode, answer.transfer) == (None, None)
    await fleet.host("prefill")
    split = await fleet.ask(tokens, route="split_or_colocated")
    assert split.prefill_engine_id == fleet.prefills[0].engine_id
    assert (await fleet.ask(tokens, route="colocated")).decode_engine_id == both.engine_id
