"""Three vLLM engines on one device, or with a rank on each of several, and the daemon between two of them, for
`vllm_pair` and `vllm_gaps`.

`solo` has no connector and is what the others are held to. The daemon can be replaced by another one while the engines
stay up: they come back to it and hand their memory in again.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from pdserve.engine.vllm.settings import VllmSettings
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import KvdOperator, Pair

_GIB: Final = 1 << 30
_START_S: Final = 120.0
_STOP_S: Final = 10.0
_COMMON: Final = (
    *("--max-model-len", "18000", "--block-size", "16", "--max-num-batched-tokens", "8192", "--max-num-seqs", "64"),
    *("--gpu-memory-utilization", "0.2"),  # vLLM's check at start; the KV's size is said by its bytes
)


def arguments(kv_gib: int, ranks: int, *more: str) -> tuple[str, ...]:
    """vLLM's arguments of an engine, with so much KV in each rank."""
    # Ranks speak by NCCL: how they do is not what is looked at here, and other ways map each other's memory too.
    split = ("--tensor-parallel-size", str(ranks), "--disable-custom-all-reduce") if ranks > 1 else ()
    return (*_COMMON, "--kv-cache-memory-bytes", str(kv_gib * _GIB), *split, *more)


@dataclass
class Rig:
    """What runs."""

    folder: Path
    """The daemon's state folder."""
    solo: EngineProcess
    pair: Pair
    kvd: KvdOperator
    ranks: int
    """Of each engine."""

    @contextlib.asynccontextmanager
    async def other_kvd(self, *flags: str, module: str = "pdserve.kvd") -> AsyncIterator[None]:
        """The same engines at another daemon; the last one has ended."""
        async with daemon(self.folder, self.kvd, *flags, module=module):
            async with asyncio.timeout(_START_S):
                while not await self._attached():  # noqa: ASYNC110  # nobody tells of the ranks' memory
                    await asyncio.sleep(0.1)
            yield

    async def _attached(self) -> bool:
        hosts = all(host.attachment.attached for host in self.pair.hosts.values())
        return hosts and await _regions(self.kvd.socket) == 2 * self.ranks


class Daemon:
    """A kvd with device memory, as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ready(self, socket: str) -> None:
        """Returns when it answers.

        Raises:
            RuntimeError: it has ended; its log says why.
            TimeoutError: it does not answer.
        """
        async with asyncio.timeout(_START_S):
            while await _regions(socket) < 0:
                if self._process.returncode is not None:
                    raise RuntimeError(f"kvd ended with {self._process.returncode}")
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        """Ends it at once; safe twice."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait_for(self._process.wait(), _STOP_S)


@contextlib.asynccontextmanager
async def daemon(folder: Path, kvd: KvdOperator, *flags: str, module: str = "pdserve.kvd") -> AsyncIterator[Daemon]:
    """Starts one that answers when this has begun; `module`: its main."""
    command = (sys.executable, "-m", module, "--state-dir", str(folder), "--transport", "gpu_ipc", "--drain", "1")
    running = Daemon(await asyncio.create_subprocess_exec(*command, *flags))
    try:
        await running.ready(kvd.socket)
        yield running
    finally:
        await running.end()


@contextlib.asynccontextmanager
async def engines(
    model: Path,
    folder: Path,
    kvd: KvdOperator,
    *more: str,
    ranks: int = 1,
    prepare: Callable[[], None] | None = None,
) -> AsyncIterator[Rig]:
    """Starts all three side by side, at the daemon that runs. `more`: vLLM's arguments for each; `ranks`: of each, one
    on each device; `prepare`: called in each engine's process first."""
    EngineProcess.preload = ()
    settings = (
        VllmSettings(str(model), args=arguments(6, ranks, *more)),
        VllmSettings(str(model), kvd.socket, args=arguments(12, ranks, *more)),
        VllmSettings(str(model), kvd.socket, args=arguments(24, ranks, "--no-enable-prefix-caching", *more)),
    )
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(*(EngineProcess.start(one, prepare) for one in settings), return_exceptions=True)
        up = [engine for engine in started if isinstance(engine, EngineProcess)]
        for engine in up:
            stack.push_async_callback(engine.aclose)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        solo, prefill, decode = up
        pair = Pair(kvd, prefill, decode)
        stack.push_async_callback(pair.aclose)
        await pair.open()
        yield Rig(folder, solo, pair, kvd, ranks)


def unmarked() -> None:
    """A `prepare`: layers are told of and not marked."""
    from pdserve.engine.vllm.device_memory import Marking

    Marking.send = lambda self, notice: self._notices.send(notice)  # type: ignore[method-assign]


def make_model(folder: Path) -> Path:
    """In a process of its own, whose device memory ends with it."""
    subprocess.run([sys.executable, "-m", "tests.hw.random_llama", str(folder)], check=True, timeout=_START_S)
    return folder


async def _regions(socket: str) -> int:
    """Ranks whose memory the daemon there has; -1 where none answers. By a channel of its own: one that has waited for
    a daemon before pauses ever longer."""
    kvd = KvdOperator(socket)
    try:
        return await kvd.regions()
    except grpc.aio.AioRpcError:
        return -1
    finally:
        await kvd.aclose()
