"""`pdserve up --restarts` with vLLM outlives what happens to its processes, and answers right afterwards.

Prefill, decode and kvd are killed, and stopped for longer than two leases, each under four requests at once: one in
READ and one in WRITE whose long prompts prefill is computing, and one of each whose answers are being streamed. The
policy is `recompute`, and there is one pair: what decode can make up for is answered with the tokens of one engine
alone; what it cannot ends with a typed error.

One deployment for all tests of this file, and beside it an engine of its own that says what is right.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.cli.processes import running
from pdserve.client import AsyncClient, Client, Completion, Mode, PdserveError, Retry
from tests.e2e import whole

if TYPE_CHECKING:
    from pdserve.cli.deployment import Deployment
    from tests.e2e.conftest import Up
    from tests.e2e.up.conftest import Attend, Begin, Fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]  # the first test starts the engines

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))
POOL_BLOCKS, CONTEXT = 400, 4096
LEASE_S: Final = 1.2
STOPPED_S: Final = 2.5
"""More than two leases, and less than gRPC waits for a peer that does not answer (3 s)."""
ANSWER_S = 60.0
BACK_S = 90.0
"""Longest waits, on a machine that does other things too: an engine takes about 15 s to start."""
SONG = 700
"""Tokens of an answer that is being streamed while something happens."""
PROMPT, ANSWER = 3300, 8
"""Tokens of a prompt that prefill computes meanwhile, in more than fifty chunks beside another, and of its answer."""
MODES: tuple[Mode, ...] = ("read", "write")

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Heard:
    """What a client got: tokens, then an answer or an error."""

    tokens: Tokens
    done: Completion | None = None
    error: PdserveError | None = None


@dataclass(frozen=True)
class Stage:
    """The deployment, and one engine alone."""

    fleet: "Fleet"
    alone: Client
    alone_up: "Up"
    songs: Mapping[Mode, tuple[Tokens, Tokens]]
    """Prompts of the streamed answers, and what is right."""

    def right(self, prompt: Sequence[int], tokens: int = ANSWER) -> Tokens:
        """What one engine alone answers, greedily."""
        return self.alone.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True).token_ids

    @property
    def at(self) -> "Deployment":
        """The record as it is now."""
        return self.fleet.up.ready()


@pytest.fixture(scope="module")
def stage(begin: "Begin", attend: "Attend") -> Iterator[Stage]:
    """The engines start side by side. At the end the deployment is drained: see `attend`."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    alone = begin(POOL_BLOCKS, CONTEXT, ("--both", "1"))
    flags = ("--prefill", "1", "--decode", "1", "--restarts", "3", "--kvd", f"lease={LEASE_S}")
    chunks = ("--long-prefill-token-threshold", "64")  # so that two prompts are computed side by side
    with attend(POOL_BLOCKS, CONTEXT, flags, chunks) as fleet, contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(alone.ready().grpc, timeout=ANSWER_S, retry=Retry(attempts=1)))
        songs: dict[Mode, tuple[Tokens, Tokens]] = {}
        for mode in MODES:
            prompt = prompt_of(100, f"song {mode}")
            said = client.generate(prompt, max_tokens=SONG, temperature=0, ignore_eos=True)
            songs[mode] = prompt, said.token_ids
        yield Stage(fleet, client, alone, songs)
        if alone.process.poll() is None:
            assert alone.end(signal.SIGINT) == 0, alone.out.read_text()


def prompt_of(length: int, name: str) -> Tokens:
    """Tokens that no other name has, so that no prefix cache knows them."""
    return tuple(random.Random(f"{SEED} {name}").choices(range(256), k=length))


async def heard(client: AsyncClient, prompt: Tokens, mode: Mode, most: int, begun: asyncio.Event) -> Heard:
    """Asks, and reads to the end; `begun` is set at the first token."""
    tokens: list[int] = []
    stream = client.stream(prompt, max_tokens=most, temperature=0, ignore_eos=True, mode=mode, on_failure="recompute")
    try:
        async for delta in stream:
            tokens += delta.token_ids
            begun.set()
        return Heard(tuple(tokens), done=await stream.completion())
    except PdserveError as error:
        return Heard(tuple(tokens), error=error)
    finally:
        begun.set()


async def until(holds: Callable[[], bool]) -> None:
    """Asked in a thread, again and again, until it holds."""
    deadline = time.monotonic() + ANSWER_S
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Story:
    """What came of the four requests."""

    songs: Mapping[Mode, Heard]
    prompts: Mapping[Mode, Tokens]
    answers: Mapping[Mode, Heard]


async def four_requests(stage: Stage, name: str, strike: Callable[[], Awaitable[None]]) -> Story:
    """Strikes while two answers are streamed and two prompts are being computed, and hears all four to their ends."""
    fleet, prompts = stage.fleet, {mode: prompt_of(PROMPT, f"{name} {mode}") for mode in MODES}
    songs: dict[Mode, asyncio.Task[Heard]] = {}
    answers: dict[Mode, asyncio.Task[Heard]] = {}

    def computing() -> bool:
        said = fleet.operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=10.0).transfers
        for one in said:
            assert one.mode == common_pb2.TRANSFER_MODE_WRITE, "READ has nothing on offer yet"
            assert one.producer_state in {"none", "computing"}
        return any(one.bytes_moved for one in said)

    async with AsyncClient(stage.at.grpc, timeout=ANSWER_S, retry=Retry(attempts=1)) as client, Ended() as ended:
        for mode in MODES:
            begun = asyncio.Event()
            songs[mode] = ended.at_last(heard(client, stage.songs[mode][0], mode, SONG, begun))
            await begun.wait()
        for count, mode in enumerate(MODES, 3):
            answers[mode] = ended.at_last(heard(client, prompts[mode], mode, ANSWER, asyncio.Event()))
            await until(lambda count=count: fleet.topology().in_flight == count)  # type: ignore[misc]
        # The two prompts share every step of prefill: where WRITE has sent some of its blocks, READ is computed too.
        await until(computing)
        assert not any(task.done() for task in (*songs.values(), *answers.values()))
        await strike()
        return Story(
            {mode: await songs[mode] for mode in MODES}, prompts, {mode: await answers[mode] for mode in MODES}
        )


class Ended:
    """Owns tasks, and ends them where a test fails before they have ended."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Heard]] = []

    def at_last(self, work: Coroutine[Any, Any, Heard]) -> asyncio.Task[Heard]:
        """Runs it."""
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def answered(stage: Stage, story: Story) -> None:
    """All four were, with what one engine alone says."""
    for mode in MODES:
        song, answer = story.songs[mode], story.answers[mode]
        assert (song.error, answer.error) == (None, None), mode
        assert song.tokens == stage.songs[mode][1], mode
        assert answer.tokens == stage.right(story.prompts[mode]), mode


def made_up_for(story: Story, mode: Mode) -> None:
    """Decode has computed the whole prompt itself, because the hand-over failed."""
    done = story.answers[mode].done
    assert done is not None
    assert (done.transfer, done.prefill_engine_id, done.fallbacks > 0) == (None, "", True)


def as_new(stage: Stage, name: str) -> None:
    """Nothing is held and nothing is broken, and the next request of each mode is handed over and answered right."""
    deadline = time.monotonic() + 15.0
    while left := whole.missing(stage.at):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    for mode in MODES:
        prompt = prompt_of(300, f"after {name} {mode}")
        done = stage.fleet.sdk.generate(
            prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True, mode=mode, on_failure="fail"
        )
        assert done.token_ids == stage.right(prompt)
        assert (done.mode, done.fallbacks, done.recomputed_tokens) == (mode, 0, 0)
        assert done.kv_bytes == stage.fleet.kv.expected_bytes(300)
    stage.fleet.idle(within=10.0)
    assert whole.missing(stage.at) == []


async def killed(stage: Stage, name: str) -> Story:
    """kill -9 under four requests; afterwards it has been started again, and nothing of the dead one was left."""
    before = stage.at

    async def strike() -> None:
        os.kill(before.processes[name], signal.SIGKILL)

    story = await four_requests(stage, f"{name} killed", strike)
    assert name == "kvd" or name.removesuffix("-0") not in whole.engines(before), "nobody waits for the next engine"
    after = whole.again(stage.fleet.up, name, before.restarts[name] + 1, BACK_S)
    assert {one for one in before.processes if before.processes[one] != after.processes[one]} == {name}
    assert list(running(before.processes[name])) == [], "vLLM's own process is gone with its service"
    return story


async def stopped(stage: Stage, name: str) -> Story:
    """SIGSTOP of it and of what it has started, for longer than two leases, and SIGCONT; it is the same afterwards."""
    before = stage.at

    async def strike() -> None:
        os.killpg(before.processes[name], signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)  # the fault itself
        finally:
            os.killpg(before.processes[name], signal.SIGCONT)

    story = await four_requests(stage, f"{name} stopped", strike)
    assert stage.at == before
    return story


async def test_kvd_stops(stage: Stage) -> None:
    """Streams do not need it; hand-overs are later, or are given up and made up for: everything is answered."""
    story = await stopped(stage, "kvd")
    answered(stage, story)
    as_new(stage, "kvd stopped")


async def test_prefill_stops(stage: Stage) -> None:
    """Its lease runs out in WRITE, and decode computes the prompt; in READ nothing is leased yet, and prefill goes on
    where it was. Streams do not need it."""
    expired = whole.kvd(stage.at).expiries["lease"]
    story = await stopped(stage, "prefill-0")
    answered(stage, story)
    made_up_for(story, "write")
    assert whole.kvd(stage.at).expiries["lease"] > expired
    as_new(stage, "prefill stopped")


async def test_decode_stops(stage: Stage) -> None:
    """Streams pause; prefill's part goes on, and waits: everything is answered, and handed over."""
    story = await stopped(stage, "decode-0")
    answered(stage, story)
    as_new(stage, "decode stopped")


async def test_kvd_dies(stage: Stage) -> None:
    """What it was to hand over is made up for by decode; streams do not need it. A new one gets all memory anew."""
    story = await killed(stage, "kvd")
    answered(stage, story)
    made_up_for(story, "write")
    as_new(stage, "kvd killed")


async def test_prefill_dies(stage: Stage) -> None:
    """What it was computing is computed by decode; streams have no need of it any more."""
    story = await killed(stage, "prefill-0")
    answered(stage, story)
    for mode in MODES:
        made_up_for(story, mode)
    as_new(stage, "prefill killed")


async def test_decode_dies(stage: Stage) -> None:
    """There is no other decode engine: streams end after a right beginning, prompts that prefill was computing without
    a token, all with a typed error that says so."""
    story = await killed(stage, "decode-0")
    for mode in MODES:
        song, answer = story.songs[mode], story.answers[mode]
        assert song.error is not None
        assert song.error.reason == "ENGINE_DIED"
        assert 0 < len(song.tokens) < SONG
        assert song.tokens == stage.songs[mode][1][: len(song.tokens)]
        assert answer.error is not None
        assert answer.error.reason == "ENGINE_DIED"
        assert answer.tokens == ()
    as_new(stage, "decode killed")


def test_the_death_of_pdserve_up_lets_answers_end(stage: Stage) -> None:
    """kill -9 of the one that has the engine alone, the last test of the file: the service drains, and so vLLM's own
    process, which would give its requests up, is not told before that. The answer is whole, and nothing is left."""
    up, (prompt, right) = stage.alone_up, stage.songs["read"]
    at = up.ready()
    assert len(up.left(at)) > len(at.processes), "the engine has a process of vLLM's"
    with stage.alone.stream(prompt, max_tokens=SONG, temperature=0, ignore_eos=True) as stream:
        next(stream)
        os.kill(up.process.pid, signal.SIGKILL)
        up.process.wait(10.0)
        assert stream.completion().token_ids == right
    deadline = time.monotonic() + BACK_S
    while left := up.left(at):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
