"""The engine port over vLLM: sampling, errors, load, death; without a hand-over."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.engine.port import Finish, Sampling
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import KvdOperator, Prompt, ask, until
from pdserve.engine.vllm.tiny import EOS_ID
from pdserve.rpc.errors import (
    ConfigError,
    ContextExceeded,
    EmptyPrompt,
    EngineDied,
    InvalidRequest,
    KvdUnavailable,
    Overloaded,
)
from tests.e2e.vllm.kinds import CONTEXT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test starts the engine
]

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
Prompts = Callable[[int], Prompt]


async def test_what_an_engine_is(solo: EngineProcess, llama: Path) -> None:
    """The facts that others route and pair by."""
    info = solo.info
    assert (info.block_size, info.max_model_len, info.vocab_size, info.ranks) == (32, 512, 512, 1)
    assert info.num_blocks == (4 << 20) // (3 * 32 * 2 * 64 * 4) - 1
    assert info.eos_token_ids == (EOS_ID,)
    assert info.tokenizer == str(llama)
    assert info.identity["attention_layout"].startswith("CPU_ATTN")
    names = set(info.identity)
    assert {"model", "weights", "dtype", "kv_dtype", "layers", "kv_heads", "head_size", "mla"} <= names
    assert "block_size" not in names  # another one is no reason not to pair: blocks are divided


async def test_a_stop_token_ends_the_answer(solo: EngineProcess, prompt: Prompts) -> None:
    """The stop token's id is the reason, in digits."""
    tokens = prompt(20)
    free = (await ask(solo, tokens, GREEDY)).tokens
    stop = next(token for index, token in enumerate(free) if index >= 2 and token not in free[:index])
    answer = await ask(solo, tokens, replace(GREEDY, stop_token_ids=(stop,)))
    assert answer.tokens == free[: free.index(stop) + 1]
    assert answer.last.finish is Finish.STOP
    assert answer.last.stop_reason == str(stop)


async def test_a_stop_string_ends_the_answer(solo: EngineProcess, prompt: Prompts) -> None:
    """The string is the reason and is not in the text."""
    tokens = prompt(21)
    free = "".join(output.text for output in (await ask(solo, tokens, replace(GREEDY, max_tokens=40))).outputs)
    stop = next(free[index : index + 2] for index in range(4, len(free)) if free[index : index + 2].isascii())
    answer = await ask(solo, tokens, replace(GREEDY, max_tokens=40, stop=(stop,)))
    assert "".join(output.text for output in answer.outputs) == free[: free.index(stop)]
    assert (answer.last.finish, answer.last.stop_reason) == (Finish.STOP, stop)


async def test_an_end_of_text_ends_the_answer_unless_ignored(solo: EngineProcess, prompt: Prompts) -> None:
    """A seed under which the model ends early is found by looking; with ignore_eos it goes on."""
    tokens = prompt(10)
    hot = Sampling(max_tokens=200, temperature=2.0)
    for seed in range(20):
        answer = await ask(solo, tokens, replace(hot, seed=seed))
        if answer.last.finish is Finish.STOP:
            break
    assert answer.last.finish is Finish.STOP
    assert answer.tokens[-1] == EOS_ID
    longer = await ask(solo, tokens, replace(hot, seed=seed, ignore_eos=True))
    assert longer.tokens[: len(answer.tokens)] == answer.tokens
    assert (len(longer.tokens), longer.last.finish) == (200, Finish.LENGTH)


async def test_a_seed_makes_sampling_repeatable(solo: EngineProcess, prompt: Prompts) -> None:
    """Equal seeds give equal tokens, others do not; all sampling parameters reach vLLM."""
    tokens = prompt(16)
    sampling = Sampling(
        max_tokens=16, min_tokens=3, temperature=1.5, top_p=0.95, top_k=100, presence_penalty=0.2,
        frequency_penalty=0.1, repetition_penalty=1.1, seed=7, ignore_eos=True,
    )  # fmt: skip
    first, again, other = [
        (await ask(solo, tokens, one)).tokens for one in (sampling, sampling, replace(sampling, seed=8))
    ]
    assert first == again
    assert first != other


async def test_log_probabilities_are_best_first(solo: EngineProcess, prompt: Prompts) -> None:
    """One position a token; greedy's token is the best; 0 asks for the sampled one alone."""
    answer = await ask(solo, prompt(12), replace(GREEDY, logprobs=4))
    positions = [position for output in answer.outputs for position in output.logprobs]
    assert [position.sampled.token_id for position in positions] == answer.tokens
    for position in positions:
        assert position.top[0] == position.sampled
        assert len(position.top) == 4
        assert sorted((c.logprob for c in position.top), reverse=True) == [c.logprob for c in position.top]
    alone = await ask(solo, prompt(12), replace(GREEDY, logprobs=0))
    assert all(position.top == () for output in alone.outputs for position in output.logprobs)


@pytest.mark.parametrize(
    ("length", "sampling", "error"),
    [
        (0, GREEDY, EmptyPrompt),
        (512, GREEDY, ContextExceeded),
        (501, GREEDY, ContextExceeded),
        (10, replace(GREEDY, logprobs=1000), InvalidRequest),
        (10, replace(GREEDY, temperature=-1.0), InvalidRequest),
        (10, replace(GREEDY, top_p=2.0), InvalidRequest),
        (10, replace(GREEDY, min_tokens=13), InvalidRequest),
        (10, replace(GREEDY, stop=("",)), InvalidRequest),
    ],
)
async def test_what_can_never_be_served_is_refused(
    length: int, sampling: Sampling, error: type[Exception], solo: EngineProcess, prompt: Prompts
) -> None:
    """Before the first output, as the caller's error, and the engine goes on."""
    with pytest.raises(error):
        await ask(solo, prompt(length), sampling)
    assert len((await ask(solo, prompt(5))).tokens) == 8


async def test_a_token_outside_the_vocabulary_is_refused(solo: EngineProcess) -> None:
    """It would read past the embedding table."""
    with pytest.raises(InvalidRequest, match="512"):
        await ask(solo, (1, 2, 512))


async def test_a_prompt_may_fill_the_context(solo: EngineProcess, prompt: Prompts) -> None:
    """Without max_tokens an answer is as long as the context has room for."""
    answer = await ask(solo, prompt(505), Sampling(temperature=0.0, ignore_eos=True))
    assert (len(answer.tokens), answer.last.finish) == (7, Finish.LENGTH)


async def test_load_counts_tokens_and_requests(solo: EngineProcess, prompt: Prompts) -> None:
    """A running request takes its blocks from the free tokens and gives them back; closing the
    iterator ends it."""
    from pdserve.engine.port import Request

    total = solo.info.num_blocks * 32
    before = await solo.load()
    assert (before.free_kv_tokens, before.total_kv_tokens) == (total, total)
    outputs = solo.generate(Request("load", prompt(100), replace(GREEDY, max_tokens=300)))
    await anext(outputs)
    during = await solo.load()
    assert during.running == 1
    assert during.free_kv_tokens <= total - 4 * 32
    assert during.steps > before.steps
    await outputs.aclose()

    async def idle() -> bool:
        load = await solo.load()
        return (load.free_kv_tokens, load.running) == (total, 0)

    await until(idle, "the request goes on after its iterator was closed")


async def test_what_runs_when_an_engine_closes_ends_with_it(kvd: KvdOperator, llama: Path, prompt: Prompts) -> None:
    """A closed engine's requests get EngineDied, never silence. (And vLLM's own bound on its queue
    is Overloaded.)"""
    args = ("--max-model-len", "512", "--block-size", "32", "--max-num-queued-reqs", "1")
    engine = await EngineProcess.start(VllmSettings(str(llama), kvd.socket, args=args))
    begun = asyncio.Event()
    running = asyncio.create_task(
        ask(engine, prompt(5), replace(GREEDY, max_tokens=500), None, lambda output: begun.set())
    )
    await begun.wait()
    with pytest.raises(Overloaded):
        await ask(engine, prompt(5))
    await engine.aclose()
    with pytest.raises(EngineDied):
        await running


async def test_a_core_that_is_told_to_stop_has_died(kvd: KvdOperator, llama: Path, prompt: Prompts) -> None:
    """SIGTERM to all processes of a service, as some supervisors stop one: vLLM's core gives up what it has before it
    ends. That is the engine's death for the request, and no defect."""
    engine = await EngineProcess.start(VllmSettings(str(llama), kvd.socket, args=CONTEXT))
    begun = asyncio.Event()
    running = asyncio.create_task(
        ask(engine, prompt(5), replace(GREEDY, max_tokens=500), None, lambda output: begun.set())
    )
    try:
        await begun.wait()
        os.kill(engine.core_pid, signal.SIGTERM)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(running, 30)
    finally:
        await engine.aclose()


async def test_a_killed_service_takes_its_engine_along(kvd: KvdOperator, llama: Path) -> None:
    """SIGKILL of the process that hosts an engine: vLLM's core would go on, unreachable, with its
    memory; it ends, and kvd hears of it."""
    engine = await EngineProcess.start(VllmSettings(str(llama), kvd.socket, args=CONTEXT))
    assert await kvd.knows(engine.info.engine_id)
    os.kill(engine.pid, signal.SIGKILL)

    async def forgotten() -> bool:
        return not await kvd.knows(engine.info.engine_id)

    await until(forgotten, "the core outlived its service")
    await engine.aclose()


async def test_a_terminals_interrupt_is_the_services_to_hear(solo: EngineProcess, prompt: Prompts) -> None:
    """Ctrl-C reaches every process of a terminal: the core goes on until its service ends it."""
    os.kill(solo.core_pid, signal.SIGINT)
    assert len((await ask(solo, prompt(5))).tokens) == 8


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("--pipeline-parallel-size", "2"), ConfigError, "--pipeline-parallel-size"),
        (("--max-model-len", "no"), ConfigError, "max-model-len"),
        (("--block-size", "24"), ConfigError, "vLLM refuses the configuration: .*block"),
        (("--max-model-len", "512", "--kv-cache-memory-bytes", "9000"), ConfigError, "vLLM refuses the configuration"),
    ],
)
async def test_a_start_that_cannot_work_says_why(
    args: tuple[str, ...], error: type[Exception], words: str, kvd: KvdOperator, llama: Path
) -> None:
    """The operator reads the reason, not vLLM's stack."""
    with pytest.raises(error, match=words):
        await EngineProcess.start(VllmSettings(str(llama), kvd.socket, args=args))


async def test_a_start_without_kvd_fails_soon(llama: Path, tmp_path: Path) -> None:
    """Before vLLM is even set up."""
    with pytest.raises(KvdUnavailable, match="no kvd"):
        await EngineProcess.start(VllmSettings(str(llama), str(tmp_path / "kvd.sock"), kvd_seconds=0.1))
