"""What the README promises of `pdserve up --engine vllm`: any client gets what one engine alone would say.

One deployment for all tests of this file: a prefill, a decode and a colocated engine, whose pools hold a few prompts.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pdserve.cli.trace import TraceStore
from pdserve.client import AsyncClient, Completion
from pdserve.rpc.channel import sync_channel
from tests.e2e.up import stored

if TYPE_CHECKING:
    from tests.e2e.up.conftest import Attend, Fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]  # the first test starts the engines

Words = Callable[[int], str]
HTTP_PAGE = Path(__file__).parents[3] / "docs" / "http.md"
POOL_BLOCKS, CONTEXT = 41, 512
MODES = ("read", "write")
ALONE = {"route": "colocated"}


@pytest.fixture(scope="module")
def fleet(attend: "Attend") -> "Iterator[Fleet]":
    """Afterwards nothing is held, and Ctrl-C ends it with status 0 and leaves no process: see `attend`."""
    with attend(POOL_BLOCKS, CONTEXT, ("--prefill", "1", "--decode", "1", "--both", "1")) as fleet:
        yield fleet


def split(mode: str) -> dict[str, str]:
    """The pair, in a mode, and no other way."""
    return {"route": "split", "mode": mode, "on_failure": "fail"}


@dataclass(frozen=True)
class Said:
    """One answer of OpenAI's client, whole or put together from its chunks."""

    texts: Sequence[str]
    finish: Sequence[str]
    tokens: int
    prompt_tokens: int
    logprobs: Sequence[float]
    facts: dict[str, Any]


def ask(fleet: "Fleet", kind: str, prompt: str, how: dict[str, str], *, stream: bool = False, **fields: Any) -> Said:
    """One request through OpenAI's client; greedy unless the fields say otherwise."""
    openai: Any = fleet.openai
    fields = {"model": fleet.at.model, "max_tokens": 16, "temperature": 0.0, "extra_body": {"pdserve": how}} | fields
    if kind == "chat":
        create = openai.chat.completions.create
        fields["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    else:
        create, fields["prompt"] = openai.completions.create, prompt
    if stream:
        chunks = list(create(stream=True, stream_options={"include_usage": True}, **fields))
        usage, facts = chunks[-1].usage, chunks[-1].model_extra["pdserve"]
    else:
        chunks = [create(**fields)]
        usage, facts = chunks[0].usage, chunks[0].model_extra["pdserve"]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    count = 1 + max(choice.index for choice in choices)
    return Said(
        ["".join(_text(choice) for choice in choices if choice.index == index) for index in range(count)],
        [choice.finish_reason for choice in sorted(choices, key=lambda choice: choice.index) if choice.finish_reason],
        usage.completion_tokens,
        usage.prompt_tokens,
        [value for choice in choices for value in _logprobs(choice)],
        facts,
    )


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return str(choice.text)
    return str((choice.delta if hasattr(choice, "delta") else choice.message).content or "")


def _logprobs(choice: Any) -> list[float]:
    if choice.logprobs is None:
        return []
    if hasattr(choice.logprobs, "content"):
        return [position.logprob for position in choice.logprobs.content]
    return list(choice.logprobs.token_logprobs)


def handed_over(facts: dict[str, Any], mode: str) -> None:
    """The answer came from two engines, in that mode, over shared memory, and nothing was computed twice."""
    assert (facts["mode"], facts["fallbacks"], facts["recomputed_tokens"]) == (mode, 0, 0)
    assert facts["transfer"]["transport"] == "shm"
    assert facts["prefill_engine_id"] != facts["decode_engine_id"]
    assert facts["prefill_engine_id"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("mode", MODES)
def test_openai_s_client(fleet: "Fleet", words: Words, mode: str, kind: str, stream: bool) -> None:
    """Text, usage, finish reason and log probabilities are those of one engine alone."""
    prompt = words(300)
    logprobs: dict[str, Any] = {"logprobs": 2} if kind == "completions" else {"logprobs": True, "top_logprobs": 2}
    alone = ask(fleet, kind, prompt, ALONE, **logprobs)
    said = ask(fleet, kind, prompt, split(mode), stream=stream, **logprobs)
    assert alone.facts["transfer"] is None
    handed_over(said.facts, mode)
    assert (said.texts, said.finish) == (alone.texts, alone.finish)
    assert (said.tokens, said.prompt_tokens) == (alone.tokens, alone.prompt_tokens) == (16, said.prompt_tokens)
    assert len(said.logprobs) == 16
    assert said.logprobs == pytest.approx(alone.logprobs, abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_two_seeded_answers(fleet: "Fleet", words: Words, mode: str) -> None:
    """n=2 with a seed: two unlike answers, the same two that one engine alone gives."""
    prompt = words(300)
    how: dict[str, Any] = {"n": 2, "seed": 7, "temperature": 0.9}
    alone = ask(fleet, "completions", prompt, ALONE, **how)
    said = ask(fleet, "completions", prompt, split(mode), **how)
    handed_over(said.facts, mode)
    assert said.texts == alone.texts
    assert said.texts[0] != said.texts[1]
    assert said.tokens == 32
    assert said.facts["transfer"]["kv_bytes"] == 2 * fleet.kv.expected_bytes(said.prompt_tokens), "once per answer"


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string(fleet: "Fleet", words: Words, mode: str) -> None:
    """The answer ends before it, in the middle of what would have been said."""
    prompt = words(200)
    alone = ask(fleet, "completions", prompt, ALONE).texts[0]
    stop = next(alone[at : at + 3] for at in range(5, len(alone)) if "\ufffd" not in alone[at : at + 3])
    said = ask(fleet, "completions", prompt, split(mode), stop=stop)
    handed_over(said.facts, mode)
    assert (said.texts, said.finish) == ([alone[: alone.index(stop)]], ["stop"])


@pytest.mark.parametrize("mode", MODES)
def test_one_token(fleet: "Fleet", words: Words, mode: str) -> None:
    """max_tokens 1, which is what every prefill is asked for: one token, and it is the right one."""
    prompt = words(200)
    alone = ask(fleet, "completions", prompt, ALONE, max_tokens=1)
    said = ask(fleet, "completions", prompt, split(mode), max_tokens=1)
    handed_over(said.facts, mode)
    assert (said.texts, said.finish, said.tokens) == (alone.texts, ["length"], 1)


def events(lines: Sequence[bytes]) -> list[Any]:
    """The server-sent events, [DONE] aside, which must be the last."""
    data = [line.removeprefix(b"data: ").strip() for line in lines if line.strip()]
    assert data[-1] == b"[DONE]"
    return [json.loads(event) for event in data[:-1]]


def test_curl_gets_chunks_as_they_are_made(fleet: "Fleet", words: Words) -> None:
    """The first chunk is there while the answer is still being made; the last is [DONE]."""
    prompt = words(60)
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    url, data = f"{fleet.at.http}/v1/completions", json.dumps({**body, "pdserve": split("write")})
    with fleet.curl(url, "-H", "Content-Type: application/json", "-d", data) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith(b"data: {"), first
        assert fleet.topology().in_flight == 1
        chunks = events([first, *process.stdout])
        assert process.wait(10.0) == 0
    handed_over(chunks[-1]["pdserve"], "write")
    alone = fleet.sdk.generate(prompt, max_tokens=400, temperature=0, ignore_eos=True, route="colocated")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone.text


def test_the_commands_that_up_prints_and_those_of_the_page(fleet: "Fleet") -> None:
    """Copied from the terminal, and from docs/http.md with the address, each one answers."""
    printed = fleet.up.out.read_text().replace("\\\n", " ")
    shown = [line.strip() for line in printed.splitlines() if re.match(r"  (pdserve|curl) ", line)]
    assert [line.split()[1] for line in shown] == ["chat", "generate", "trace", "-N"]
    page = re.findall(r"^curl .*?\}'$", HTTP_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert page
    shown += [command.replace("http://127.0.0.1:8000", fleet.at.http) for command in page]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in shown:
        said = subprocess.run(
            ["bash", "-c", command], input=b"Hi\n", capture_output=True, timeout=40, env={**os.environ, "PATH": path}
        )
        assert said.returncode == 0, (command, said.stderr)
        assert said.stdout.strip(), command
        if command.startswith("curl"):
            assert events(said.stdout.splitlines()), command


@pytest.mark.parametrize("mode", MODES)
def test_the_sdk_says_where_the_time_and_the_bytes_went(fleet: "Fleet", words: Words, mode: Any) -> None:
    """Parts sum to TTFT, bytes are those that the model's shape and the prompt's length make, and nothing is left
    unexplained."""
    prompt = words(400)
    with fleet.sdk.stream(prompt, max_tokens=24, temperature=0, mode=mode, route="split") as stream:
        deltas = list(stream)
        done = stream.completion()
    alone = fleet.sdk.generate(prompt, max_tokens=24, temperature=0, route="colocated")
    assert (done.token_ids, done.text) == (alone.token_ids, alone.text)
    assert len(deltas) > 1
    assert tuple(token for delta in deltas for token in delta.token_ids) == done.token_ids
    assert (done.mode, done.transport, done.recomputed_tokens, done.fallbacks) == (mode, "shm", 0, 0)
    assert done.usage.prompt_tokens > 128, "more than one chunk"
    assert done.kv_bytes == fleet.kv.expected_bytes(done.usage.prompt_tokens)
    timings = done.timings
    assert sum(timings.parts.values()) + timings.unattributed_seconds == pytest.approx(timings.ttft_seconds, abs=1e-6)
    assert timings.unattributed_seconds <= max(0.001, 0.01 * timings.ttft_seconds)
    assert {"prefill.forward", "kv.wait", "decode.first_step"} <= set(timings.parts)
    assert 0 < timings.ttft_seconds < timings.e2e_seconds


def test_every_service_can_be_explored_and_is_healthy(fleet: "Fleet") -> None:
    """Reflection lists what each process serves, with its methods, and grpc.health says SERVING of all of it."""
    addresses = {engine.role: engine.address for engine in fleet.topology().engines}
    served = {
        fleet.at.grpc: {"pdserve.api.serving.v1.Inference"},
        fleet.at.kvd: {"pdserve.api.kvd.v1.Kvd", "pdserve.api.kvd.v1.Operator"},
        addresses["prefill"]: {"pdserve.api.prefill.v1.Prefill"},
        addresses["decode"]: {"pdserve.api.decode.v1.Decode"},
        addresses["both"]: {"pdserve.api.decode.v1.Decode"},
    }
    assert fleet.at.kvd.startswith("unix:")
    for target, ours in served.items():
        with sync_channel(target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            listed = set(database.get_services())
            assert {name for name in listed if name.startswith("pdserve.")} == ours
            assert "grpc.health.v1.Health" in listed
            for name in ours:
                area, _, service = name.rpartition(".")
                file = database.FindFileContainingSymbol(name)
                assert (file.package, service in {one.name for one in file.service}) == (area, True)
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", *ours):
                said = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10.0)
                assert said.status == health_pb2.HealthCheckResponse.SERVING, (target, name)


def test_status_and_generate_as_json(fleet: "Fleet", words: Words) -> None:
    """`pdserve status` has a line per engine; `pdserve generate --json` says what the SDK says."""
    fleet.idle(within=10.0)
    status = fleet.up.command("status")
    assert status.returncode == 0, status.stderr
    rows = [line.split() for line in status.stdout.partition("\n\n")[0].splitlines()[4:]]
    assert sorted(row[1] for row in rows) == ["both", "decode", "prefill"]
    assert {row[4] for row in rows} == {"ready"}
    prompt = words(100)
    alone = fleet.sdk.generate(prompt, max_tokens=8, temperature=0, route="colocated")
    for mode in MODES:
        said = fleet.up.command("generate", prompt, "--max-tokens", "8", "--temperature", "0", "--mode", mode, "--json")
        assert said.returncode == 0, said.stderr
        answer = json.loads(said.stdout)
        assert tuple(answer["choices"][0]["token_ids"]) == alone.token_ids
        assert (answer["mode"], answer["transfer"]["transport"], answer["fallbacks"]) == (mode, "shm", 0)


async def test_twenty_requests_at_once(fleet: "Fleet", words: Words) -> None:
    """READ and WRITE mixed, prompts of one token to many blocks, more than the pools can hold at once: every answer
    is the one that one engine alone gives."""
    text, source = words(6000), random.Random(len(words(1)))
    lengths = [1, 2, *(source.randrange(3, 420) for _ in range(18))]
    prompts = [text[300 * at : 300 * at + length] for at, length in enumerate(lengths)]

    async with AsyncClient(fleet.at.grpc, timeout=60.0) as client:

        async def answer(prompt: str, **how: Any) -> Completion:
            return await client.generate(prompt, max_tokens=16, temperature=0, on_failure="fail", **how)

        alone = await asyncio.gather(*(answer(prompt, route="colocated") for prompt in prompts))
        modes = [MODES[at % 2] for at in range(len(prompts))]
        both = await asyncio.gather(
            *(answer(prompt, route="split", mode=mode) for prompt, mode in zip(prompts, modes, strict=True))
        )
    assert sum(done.usage.prompt_tokens for done in both) > POOL_BLOCKS * fleet.kv.block_size
    for mode, one, two in zip(modes, alone, both, strict=True):
        assert (two.token_ids, two.text) == (one.token_ids, one.text), (mode, one.usage)
        assert (two.mode, two.fallbacks, two.recomputed_tokens) == (mode, 0, 0)


@pytest.mark.parametrize("mode", MODES)
async def test_twenty_traces_explain_their_ttft(fleet: "Fleet", words: Words, mode: Any) -> None:
    """Five at a time, the last five with prompts that the prefix caches know: what the deployment's own trace store
    tells of each is whole, says the numbers that its client got, and leaves at most max(1 ms, 1 %) of its TTFT
    unexplained."""
    text, source = words(4500), random.Random(len(words(1)))
    lengths = [1, *(source.randrange(2, 420) for _ in range(14))]
    prompts = [text[300 * at : 300 * at + length] for at, length in enumerate(lengths)]
    answers: list[Completion] = []

    async def answer(client: AsyncClient, prompt: str) -> Completion:
        how: dict[str, Any] = split(mode)
        return await client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True, **how)

    async with AsyncClient(fleet.at.grpc, timeout=60.0) as client:
        for at in (0, 5, 10, 0):
            asked = [answer(client, prompt) for prompt in prompts[at : at + 5]]
            answers += await asyncio.gather(*asked)
    store = TraceStore(fleet.at.traces, timeout=10.0)
    for said in answers:
        await asyncio.to_thread(stored.explained, store, said, mode)
