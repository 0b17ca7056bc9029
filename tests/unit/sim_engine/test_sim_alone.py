"""A simulated engine without a kvd: requests, chunks, caching, preemption, aborts, time, death."""

import asyncio
import time
from typing import Any

import pytest

from pdserve.costmodel import CostModel
from pdserve.engine.port import Finish, Request, Sampling
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.rpc.errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineDied,
    InvalidRequest,
    PdserveError,
    PoolExceeded,
)


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    return Request(name, tuple(prompt), Sampling(**{"temperature": 0, "max_tokens": 20, **sampling}))


@pytest.mark.parametrize("budget", [7, 16, 512])
@pytest.mark.parametrize("blocks", [20, 512])
async def test_the_text_depends_on_the_prompt_only(helpers: Any, budget: int, blocks: int) -> None:
    """Whatever chunks, batch and preemptions: the same greedy text, and every block comes back."""
    engine = await SimEngine.start(SimConfig(token_budget=budget, num_blocks=blocks))
    prompts = [[i, *range(1 + 9 * i)] for i in range(8)]
    got = await asyncio.gather(*(helpers.collect(engine, request(str(i), p)) for i, p in enumerate(prompts)))
    other = await SimEngine.start(SimConfig())
    for index, prompt in enumerate(prompts):
        alone = await helpers.collect(other, request("alone", prompt))
        assert helpers.text(got[index]) == helpers.text(alone)
        assert sum(len(o.token_ids) for o in alone) == 20
    if blocks == 512:
        assert engine.preemptions == 0
    elif budget == 512:
        assert engine.preemptions > 0
    assert engine.idle
    engine.integrity()
    assert engine.corrupt == 0
    await engine.aclose()
    await other.aclose()


async def test_cached_tokens_are_counted(helpers: Any) -> None:
    """A second request finds the whole blocks of the first, without its last token; not when off."""
    prompt = list(range(64))
    for config, cached in ((SimConfig(), 48), (SimConfig(prefix_cache=False), 0)):
        engine = await SimEngine.start(config)
        first = await helpers.collect(engine, request("1", prompt))
        second = await helpers.collect(engine, request("2", prompt))
        assert (first[-1].cached_tokens, second[-1].cached_tokens) == (0, cached)
        assert helpers.text(first) == helpers.text(second)
        await engine.aclose()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": ()}, EmptyPrompt),
        ({"prompt": (1,) * 100}, ContextExceeded),
        ({"prompt": (1,) * 65}, PoolExceeded),
        ({"prompt": (258,)}, InvalidRequest),
        ({"sampling": Sampling(max_tokens=0)}, InvalidRequest),
        ({"sampling": Sampling(logprobs=21)}, InvalidRequest),
    ],
    ids=["empty", "context", "pool", "vocabulary", "max_tokens", "logprobs"],
)
async def test_bad_requests_are_refused_before_anything_is_held(
    helpers: Any, change: dict[str, Any], error: type[PdserveError]
) -> None:
    """Each has its own class, and leaves nothing behind."""
    engine = await SimEngine.start(SimConfig(max_model_len=100, num_blocks=4))
    bad = Request("bad", **{"prompt": (1, 2), "sampling": Sampling(), **change})
    with pytest.raises(error):
        await helpers.collect(engine, bad)
    assert engine.idle
    assert engine.load().free_kv_tokens == 64
    await engine.aclose()


async def test_an_id_twice_at_once_is_refused(helpers: Any) -> None:
    """And may be used again afterwards."""
    engine = await SimEngine.start(SimConfig())
    stream = engine.generate(request("x", [1, 2]))
    await anext(stream)
    with pytest.raises(InvalidRequest, match="being served"):
        await helpers.collect(engine, request("x", [1, 2]))
    await stream.aclose()
    assert await helpers.collect(engine, request("x", [1, 2]))
    await engine.aclose()


@pytest.mark.parametrize(("prompt", "most"), [(90, 10), (40, 25), (64, 1)], ids=["context", "pool", "all"])
async def test_an_answer_ends_with_the_context_or_the_pool(helpers: Any, prompt: int, most: int) -> None:
    """Without max_tokens an answer runs to what can be held, by length; its last token needs no place."""
    config = SimConfig(max_model_len=100, num_blocks=512 if most == 10 else 4)
    engine = await SimEngine.start(config)
    outputs = await helpers.collect(engine, request("x", [1] * prompt, max_tokens=None))
    assert (len(outputs), outputs[-1].finish) == (most, Finish.LENGTH)
    await engine.aclose()


async def test_closing_the_stream_aborts(helpers: Any) -> None:
    """A consumer that goes, running or queued, gives its blocks back at once."""
    engine = await SimEngine.start(SimConfig(max_seqs=1))
    running, queued = (engine.generate(request(n, [1] * 40, max_tokens=None)) for n in "ab")
    await anext(running)
    waiting = asyncio.ensure_future(anext(queued))
    await helpers.until(lambda: engine.load().waiting == 1)
    assert engine.load().running == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await running.aclose()
    await helpers.until(lambda: engine.idle)
    assert engine.load().free_kv_tokens == engine.load().total_kv_tokens
    await engine.aclose()


async def test_time_comes_from_the_cost_model(helpers: Any) -> None:
    """The sleeps of a request are those of its steps: chunks of prompt, then tokens."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    cost = CostModel(1.0, 0.01, 2.0, 0.1, 0.001, 0.0, 0.0)
    engine = await SimEngine.start(SimConfig(cost=cost, token_budget=32), sleep=sleep)
    await helpers.collect(engine, request("x", [1] * 40, max_tokens=3))
    assert slept == pytest.approx([1.32, 1.08, 2.1 + 0.041, 2.1 + 0.042])
    await engine.aclose()


async def test_stamps_are_in_order(helpers: Any) -> None:
    """Scheduled, then first token, on the monotonic clock, the same on every output."""
    before = time.monotonic_ns()
    engine = await SimEngine.start(SimConfig())
    outputs = await helpers.collect(engine, request("x", [1] * 40))
    times = {o.times for o in outputs}
    assert len(times) == 1
    assert before < outputs[0].times.scheduled_ns <= outputs[0].times.first_token_ns <= time.monotonic_ns()
    await engine.aclose()


async def test_a_defect_in_a_step_ends_the_engine_loudly(helpers: Any) -> None:
    """An exception in a step fails what is open and what comes, and `failed` says why."""

    async def broken(seconds: float) -> None:
        raise ZeroDivisionError("planted")

    engine = await SimEngine.start(SimConfig(), sleep=broken)
    with pytest.raises(EngineDied, match="planted"):
        await helpers.collect(engine, request("x", [1]))
    assert "planted" in await engine.failed()
    with pytest.raises(EngineDied):
        await helpers.collect(engine, request("y", [1]))
    await engine.aclose()
    await engine.aclose()


async def test_overwritten_kv_is_found_at_the_end(helpers: Any) -> None:
    """Somebody writes into a running request's blocks: the request ends with an error, not with text."""
    engine = await SimEngine.start(SimConfig(layers=1))
    stream = engine.generate(request("x", [1] * 40))
    await anext(stream)
    engine.memory().words[0, 0] = 0
    with pytest.raises(EngineDied, match="corrupt KV at its end"):
        async for _ in stream:
            pass
    assert engine.corrupt == 1
    await helpers.until(lambda: engine.idle)
    await engine.aclose()


async def test_three_hundred_engines_fit(helpers: Any) -> None:
    """Hundreds of engines in one process start, serve and close within seconds."""
    began = time.monotonic()
    config = SimConfig(layers=2, num_blocks=32)
    engines = [await SimEngine.start(config) for _ in range(300)]
    answers = await asyncio.gather(*(helpers.collect(e, request("x", [1, 2, 3], max_tokens=4)) for e in engines))
    assert len({helpers.text(a) for a in answers}) == 1
    for engine in engines:
        await engine.aclose()
    print(f"300 engines: {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 20
