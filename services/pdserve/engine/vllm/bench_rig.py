"""What the engine's benchmark measures on: kvd, engines on cores of their own, and streams that know
when each token came."""

import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, TextIO

from pdserve.engine.port import Output, Request
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.engine.vllm.testing_pair import GREEDY, KvdOperator, Prompt
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from pdserve.kvd.testing import kvd_process
from pdserve.rpc.errors import DeadlinePassed, PdserveError

BLOCK: Final = 32
"""Tokens of a KV block."""
CONTEXT: Final = 256
"""Prompt tokens of a measured stream, so that a step reads KV as well as weights."""
MAX_LEN: Final = 4096
WARM: Final = 8
"""First tokens of a stream that do not count."""
_DEADLINE_S: Final = 60.0
"""Longest life of a stream."""


@dataclass(frozen=True, slots=True)
class Rig:
    """Settings of the two kinds of engine, and the daemon."""

    kvd: KvdOperator
    ours: VllmSettings
    """Attached to kvd; on the measured core."""
    prefill: VllmSettings
    """Attached to kvd; on another core, if there is one."""


@contextlib.asynccontextmanager
async def open_rig(shape: TinyShape, kv_blocks: int) -> AsyncIterator[Rig]:
    """A model, a daemon, and settings. From here on this process and all that it starts keep off the
    last core, but for the engines whose settings name it: they compute there, one at a time.

    `kv_blocks`: size of each engine's KV memory.
    """
    cores = sorted(os.sched_getaffinity(0))
    measured, others = cores[-1], cores[:-1] or cores
    size = kv_blocks * shape.layers * 2 * BLOCK * shape.kv_heads * shape.head_dim * 4
    args = ("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(size))
    with tempfile.TemporaryDirectory(prefix="pdsb") as name:
        folder = Path(name)
        model, socket = str(folder / "model"), str(folder / "kvd.sock")
        ours = VllmSettings(model, socket, args=args, cpus=(measured,))
        prefill = replace(ours, cpus=(others[0],))
        with _confined(others):
            await asyncio.to_thread(tiny_llama, Path(model), shape)
            # The first offers wait until all prompts are computed, as long as the machine takes.
            async with kvd_process(folder, "--accept", "60", "--lease", "120"):
                operator = KvdOperator(socket)
                try:
                    yield Rig(operator, ours, prefill)
                finally:
                    await operator.aclose()


@contextlib.contextmanager
def _confined(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def only_results() -> Iterator[TextIO]:
    """Yields the stdout that was. What vLLM's processes write to stdout and stderr from here on is
    kept, and shown on stderr where the block fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said, open(os.dup(1), "w") as out, open(os.dup(2), "wb") as err:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            yield out
        except Exception:
            said.seek(0)
            shutil.copyfileobj(said, err)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)


class Generates(Protocol):
    """The part of an engine that a stream needs."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See engine.port."""
        ...


class Stream:
    """One decode stream that runs until it is closed."""

    def __init__(self, engine: Generates, prompt: Prompt) -> None:
        self.times: list[float] = []
        """When each token was heard of here: seconds of the monotonic clock."""
        self._more = asyncio.Event()
        sampling = replace(GREEDY, max_tokens=MAX_LEN - len(prompt) - 1)
        self._outputs = engine.generate(Request(f"s-{os.urandom(6).hex()}", prompt, sampling))
        self._task = asyncio.create_task(self._run())

    @property
    def tokens(self) -> int:
        """How many have come."""
        return len(self.times)

    async def go_on(self, tokens: int) -> None:
        """Returns when so many more have come.

        Raises:
            PdserveError: the stream has ended before.
        """
        goal = self.tokens + tokens
        while self.tokens < goal:
            if self._task.done():
                await self._task
                raise PdserveError(f"the measured stream ended after {self.tokens} tokens")
            self._more.clear()
            await self._more.wait()

    async def aclose(self) -> None:
        """Ends it; raises what it died of."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._outputs) as outputs:
                async for output in outputs:
                    self.times += [time.perf_counter()] * len(output.token_ids)
                    self._more.set()
        finally:
            self._more.set()


@contextlib.asynccontextmanager
async def streaming(engine: Generates, prompt: Prompt) -> AsyncIterator[Stream]:
    """A stream past its first tokens.

    Raises:
        DeadlinePassed: what it was wanted for took longer than 60 s.
    """
    try:
        async with asyncio.timeout(_DEADLINE_S), contextlib.aclosing(Stream(engine, prompt)) as stream:
            await stream.go_on(WARM)
            yield stream
    except TimeoutError as error:
        raise DeadlinePassed(f"a measured stream took longer than {_DEADLINE_S:g} s") from error


def random_prompt(draw: random.Random, tokens: int) -> Prompt:
    """Tokens that no cache knows."""
    return tuple(draw.randrange(256) for _ in range(tokens))
