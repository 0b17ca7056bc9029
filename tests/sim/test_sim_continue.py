"""Decode engines that die in the middle of an answer: the client sees one answer, as one engine alone gives it."""

import asyncio
import json
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from pdserve.client import Completion, Delta
from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.sim.hosted import Service

TOKENS = 100
MOST = 12
BOTH = pytest.mark.parametrize("mode", ["read", "write"])


class Watched:
    """An answer over gRPC, as far as the test has read it."""

    def __init__(self, fleet: Fleet, prompt: Any, **fields: Any) -> None:
        self.stream = fleet.stream(prompt, **({"max_tokens": MOST} | fields))
        self.deltas: list[Delta] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the client has."""
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    async def until(self, count: int) -> None:
        """Reads on to this many tokens in all."""
        while len(self.tokens) < count:
            self.deltas.append(await anext(self.stream))

    async def rest(self) -> Completion:
        """Reads on to the end."""
        async for delta in self.stream:
            self.deltas.append(delta)
        return await self.stream.completion()


def text(tokens: tuple[int, ...]) -> str:
    """What the sim's tokens say."""
    return bytes(tokens).decode()


async def gives(doomed: Service, read: Awaitable[None], tokens: int) -> None:
    """Lets decode make this many tokens and holds it in the step after; `read` takes them."""
    reading = asyncio.ensure_future(read)
    await doomed.steps.pass_one(tokens)
    await reading
    await doomed.steps.reached()


async def replaced(fleet: Fleet, doomed: Service) -> Service:
    """Kills decode; another one is there, which is held at its first step."""
    heir = await fleet.host("decode")
    heir.steps.shut()
    await fleet.kill(doomed)
    return heir


@BOTH
@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
async def test_a_stream_goes_on(launch: Launch, prompt: Prompt, mode: str, on_failure: str) -> None:
    """Decode dies after 3 of 12 tokens: the same tokens, text and usage as without, and one continuation."""
    fleet = await launch()
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    doomed.steps.shut()
    answer = Watched(fleet, tokens, mode=mode, on_failure=on_failure)
    await gives(doomed, answer.until(3), 3)
    heir = await replaced(fleet, doomed)
    heir.steps.open()
    done = await answer.rest()
    alone = await fleet.alone(tokens, MOST)
    assert (done.token_ids, answer.tokens, done.text) == (alone, alone, text(alone))
    assert done.choices[0].finish_reason == "length"
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (TOKENS, MOST, 0)
    assert (done.continuations, done.fallbacks, done.mode) == (1, 0, mode)
    assert done.decode_engine_id == heir.engine_id
    await fleet.settled(5)


@BOTH
async def test_a_stream_goes_on_over_http(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Server-sent events: no break, one finish reason, one [DONE], and the last chunk says what happened."""
    fleet = await launch()
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    doomed.steps.shut()
    body = {"prompt": list(tokens), "max_tokens": MOST, "temperature": 0, "stream": True, "pdserve": {"mode": mode}}
    chunks = list[Any]()

    async def read(response: Any, count: int) -> None:
        while len(chunks) < count and (line := await response.content.readline()):
            if line.strip():
                said = line.removeprefix(b"data: ").strip()
                chunks.append("[DONE]" if said == b"[DONE]" else json.loads(said))

    async def ask() -> Any:
        response = await fleet.http.post("/v1/completions", json=body)
        await read(response, 3)
        return response

    asking = asyncio.create_task(ask())
    await doomed.steps.pass_one(3)
    response = await asking
    await doomed.steps.reached()
    heir = await replaced(fleet, doomed)
    heir.steps.open()
    await read(response, MOST + 1)
    assert chunks.pop() == "[DONE]"
    alone = await fleet.alone(tokens, MOST)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text(alone)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (MOST - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    facts = chunks[-1]["pdserve"]
    assert (facts["continuations"], facts["fallbacks"], facts["mode"]) == (1, 0, mode)
    response.close()
    await fleet.settled(5)


@BOTH
async def test_twice_in_a_row(launch: Launch, prompt: Prompt, mode: str) -> None:
    """The engine that took the answer up dies as well."""
    fleet = await launch()
    tokens, first = prompt(TOKENS), fleet.decodes[0]
    first.steps.shut()
    answer = Watched(fleet, tokens, mode=mode)
    await gives(first, answer.until(3), 3)
    second = await replaced(fleet, first)
    await gives(second, answer.until(8), 5)
    third = await replaced(fleet, second)
    third.steps.open()
    done = await answer.rest()
    assert done.token_ids == await fleet.alone(tokens, MOST)
    assert (done.continuations, done.usage.completion_tokens) == (2, MOST)
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("continuations", [0, 1])
async def test_only_so_often(launch: Launch, prompt: Prompt, mode: str, continuations: int) -> None:
    """At the bound the stream ends with the typed error of the engine that died, and nothing is held."""
    fleet = await launch(proxy={"continuations": continuations})
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    doomed.steps.shut()
    answer = Watched(fleet, tokens, mode=mode)
    for number in range(continuations + 1):
        await gives(doomed, answer.until(3 * number + 3), 3)
        doomed = await replaced(fleet, doomed)
    with pytest.raises(errors.EngineDied):
        await answer.rest()
    assert answer.tokens == (await fleet.alone(tokens, MOST))[: 3 * continuations + 3]
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
async def test_with_no_other_pair(launch: Launch, prompt: Prompt, mode: str, on_failure: str) -> None:
    """Prefill and decode are both gone and only a decode engine is left: policy `recompute` lets it compute prompt and
    answer so far, `fail` says what happened."""
    fleet = await launch()
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    doomed.steps.shut()
    answer = Watched(fleet, tokens, mode=mode, on_failure=on_failure)
    await gives(doomed, answer.until(3), 3)
    heir = await fleet.host("decode")
    await fleet.kill(fleet.prefills[0])
    await fleet.until(lambda: not fleet.routable(fleet.prefills[0]))
    await fleet.kill(doomed)
    if on_failure == "fail":
        with pytest.raises(errors.EngineDied):
            await answer.rest()
    else:
        done = await answer.rest()
        assert done.token_ids == await fleet.alone(tokens, MOST)
        assert (done.continuations, done.recomputed_tokens, done.mode) == (1, TOKENS + 3, None)
        assert (done.usage.prompt_tokens, done.decode_engine_id) == (TOKENS, heir.engine_id)
    await fleet.settled(5)


@BOTH
@pytest.mark.parametrize("given", [1, 3, 5])
async def test_a_stop_string_across_the_seam(launch: Launch, prompt: Prompt, mode: str, given: int) -> None:
    """The string begins in tokens of the first engine and ends in those of the second: it ends the answer, nothing
    of it is in the text, and what was held back for its sake is."""
    fleet = await launch()
    tokens, doomed = prompt(TOKENS), fleet.decodes[0]
    alone = text(await fleet.alone(tokens, MOST))
    stop = alone[2:7]
    doomed.steps.shut()
    answer = Watched(fleet, tokens, mode=mode, stop=(stop, "never there"))
    await gives(doomed, answer.until(given), given)
    (await replaced(fleet, doomed)).steps.open()
    done = await answer.rest()
    at = alone.index(stop)
    assert (done.text, done.choices[0].stop_reason, done.choices[0].finish_reason) == (alone[:at], stop, "stop")
    assert (text(answer.tokens), done.continuations) == (alone[: at + 5], 1)
    await fleet.settled(5)


@BOTH
async def test_everything_that_is_counted(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Log probabilities, min_tokens and stop tokens are those of the answer that did not break off."""
    fleet = await launch()
    tokens = prompt(TOKENS)
    alone = await fleet.alone(tokens, MOST)
    fields: dict[str, Any] = {"logprobs": 2, "min_tokens": 7, "stop_token_ids": [alone[1], alone[8]], "mode": mode}
    whole = await fleet.ask(tokens, max_tokens=MOST, **fields)
    doomed = fleet.decodes[0]
    doomed.steps.shut()
    answer = Watched(fleet, tokens, **fields)
    await gives(doomed, answer.until(5), 5)
    (await replaced(fleet, doomed)).steps.open()
    done = await answer.rest()
    assert done.choices == whole.choices
    assert (done.usage.completion_tokens, done.continuations) == (whole.usage.completion_tokens, 1)
    await fleet.settled(5)


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.0, "seed": 3}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"n": 2}]
)
async def test_what_cannot_go_on(launch: Launch, prompt: Prompt, fields: dict[str, Any]) -> None:
    """Where another engine's tokens would not be this answer's, the stream ends with the typed error."""
    fleet = await launch()
    doomed = fleet.decodes[0]
    doomed.steps.shut()
    answer = Watched(fleet, prompt(TOKENS), **fields)
    await gives(doomed, answer.until(2), 2)
    (await replaced(fleet, doomed)).steps.open()
    with pytest.raises(errors.EngineDied):
        await answer.rest()
    await fleet.settled(5)


@BOTH
async def test_many_streams_at_once(launch: Launch, prompt: Prompt, rng: random.Random, mode: str) -> None:
    """Twelve streams of drawn lengths over two decode engines, one of which dies in the middle: every answer is whole
    and right."""
    fleet = await launch(decodes=2)
    prompts = [prompt(rng.randrange(20, 200)) for _ in range(12)]
    lengths = [rng.randrange(30, 120) for _ in prompts]
    fleet.decodes[0].steps.shut()
    answers = [
        Watched(fleet, one, mode=mode, max_tokens=most, stop=rng.choice([(), ("never there",)]))
        for one, most in zip(prompts, lengths, strict=True)
    ]
    reading = [asyncio.create_task(answer.rest()) for answer in answers]
    await fleet.decodes[0].steps.pass_one(rng.randrange(10, 25))
    await fleet.decodes[0].steps.reached()
    await fleet.kill(fleet.decodes[0])
    for done, one, most in zip(await asyncio.gather(*reading), prompts, lengths, strict=True):
        assert done.token_ids == await fleet.alone(one, most)
        assert done.text == text(done.token_ids)
        assert done.usage.completion_tokens == most
    assert any(task.result().continuations for task in reading)
    await fleet.settled(5)
