"""Engines in processes of their own, for tests and benchmarks.

vLLM forks, so an engine must start before its process uses gRPC: a test process that has already
talked to kvd cannot host one. `EngineProcess` starts a fresh one from a fork server that has vLLM
imported, which makes an engine of a tiny model a matter of a second.
"""

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar

from pdserve.engine.port import EngineInfo, Load, Output, Request
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.rpc.errors import EngineDied, PdserveError, from_reason

START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 30.0


class EngineProcess:
    """A VllmEngine behind a pipe, with the engine port's words. Call on one loop."""

    preload: ClassVar[Sequence[str]] = ("pdserve.engine.vllm.preload",)
    """What the fork server imports; nothing on a device, which a process that is forked of one that uses it cannot."""

    def __init__(self, settings: VllmSettings, prepare: Callable[[], None] | None = None) -> None:
        context = self.fork_server()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, theirs, prepare), name="engine")
        self._process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._answers: dict[str, asyncio.Queue[Any]] = {}
        self._calls = 0
        self._dead = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._info: EngineInfo | None = None

    @classmethod
    async def start(cls, settings: VllmSettings, prepare: Callable[[], None] | None = None) -> "EngineProcess":
        """Raises what VllmEngine.start raises.

        `prepare`: called in the new process before the engine starts, whose own processes are forked
        of it; must pickle.
        """
        engine = cls(settings, prepare)
        try:
            engine._info = await engine._call("start", timeout=START_TIMEOUT_S)
        except BaseException:
            await engine.aclose()
            raise
        return engine

    @classmethod
    def fork_server(cls) -> ForkServerContext:
        """Makes processes that have imported vLLM."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(cls.preload))
        return context

    @property
    def pid(self) -> int:
        """Of the process that hosts the engine."""
        return self._process.pid or 0

    @property
    def core_pid(self) -> int:
        """Of vLLM's EngineCore, which owns the KV memory of an engine with one rank."""
        return self._cores()[0]

    @property
    def info(self) -> EngineInfo:
        """Fixed facts."""
        if self._info is None:
            raise EngineDied("the engine has not started")
        return self._info

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """As the engine's; closing it early aborts the request."""
        key, answers = self._open()
        try:
            self._send(("generate", key, request))
            while (output := _raised(await answers.get())) is not None:
                yield output
        finally:
            del self._answers[key]
            self._send(("abort", key, None))

    async def load(self) -> Load:
        """The load now."""
        load: Load = await self._call("load")
        return load

    async def failed(self) -> str:
        """As the engine's."""
        return str(await self._call("failed", timeout=None))

    async def metric(self, name: str) -> float:
        """The sum of one of vLLM's own Prometheus samples, such as `vllm:num_preemptions_total`."""
        return float(await self._call("metric", value=name))

    async def aclose(self) -> None:
        """Ends the engine and its process; safe twice."""
        if self._process.is_alive() and not self._dead:
            with contextlib.suppress(PdserveError):  # it may be dying already
                await self._call("close")
        await asyncio.to_thread(self._process.join, _CALL_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, _CALL_TIMEOUT_S)
        await asyncio.to_thread(self._reader.join, _CALL_TIMEOUT_S)
        self._pipe.close()

    def memory(self) -> Path:
        """The file of rank 0's KV memory, as long as the engine lives."""
        for core in self._cores():
            for entry in Path(f"/proc/{core}/fd").iterdir():
                if os.readlink(entry).startswith("/memfd:pdserve-kv"):
                    return entry
        raise EngineDied("the engine has no KV memory")

    def _cores(self) -> list[int]:
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        if not found:
            raise EngineDied("the engine has no core")
        return [int(pid) for pid in found]

    async def _call(self, what: str, timeout: float | None = _CALL_TIMEOUT_S, value: Any = None) -> Any:
        key, answers = self._open()
        try:
            self._send((what, key, value))
            async with asyncio.timeout(timeout):
                return _raised(await answers.get())
        finally:
            del self._answers[key]

    def _open(self) -> tuple[str, asyncio.Queue[Any]]:
        if self._dead:
            raise EngineDied("the engine's process has ended")
        self._calls += 1
        key = str(self._calls)
        self._answers[key] = asyncio.Queue()
        return key, self._answers[key]

    def _send(self, message: tuple[str, str, Any]) -> None:
        with contextlib.suppress(OSError):  # the reader sees the end too, and tells everyone
            self._pipe.send(message)

    def _read(self) -> None:
        while True:
            try:
                key, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            self._loop.call_soon_threadsafe(self._deliver, key, value)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._lost)

    def _deliver(self, key: str, value: Any) -> None:
        if key in self._answers:
            self._answers[key].put_nowait(value)

    def _lost(self) -> None:
        self._dead = True
        for answers in self._answers.values():
            answers.put_nowait(_Raised(EngineDied("the engine's process has ended")))


class _Raised:
    """An error on its way through a pipe."""

    def __init__(self, error: PdserveError) -> None:
        self.reason, self.message, self.metadata = error.reason, error.message, error.metadata

    def error(self) -> PdserveError:
        return from_reason(self.reason, self.message, self.metadata)


def _raised(value: Any) -> Any:
    if isinstance(value, _Raised):
        raise value.error()
    return value


def _serve(settings: VllmSettings, pipe: Connection, prepare: Callable[[], None] | None) -> None:
    """The other process."""
    if prepare is not None:
        prepare()
    asyncio.run(_Server(pipe).run(settings))


class _Server:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, settings: VllmSettings) -> None:
        from pdserve.engine.vllm.engine import VllmEngine

        _, key, _ = await asyncio.to_thread(self._pipe.recv)
        try:
            engine = await VllmEngine.start(settings)
        except PdserveError as error:
            self._pipe.send((key, _Raised(error)))
            return
        self._pipe.send((key, engine.info))
        try:
            while True:
                what, key, value = await asyncio.to_thread(self._pipe.recv)
                if what == "generate":
                    self._running[key] = asyncio.create_task(self._generate(engine, key, value))
                elif what == "metric":
                    self._pipe.send((key, _sample(value)))
                elif what == "failed":
                    self._running[key] = asyncio.create_task(self._failed(engine, key))
                elif what == "abort":
                    if (task := self._running.get(key)) is not None:
                        task.cancel()
                elif what == "load":
                    self._pipe.send((key, engine.load()))
                elif what == "close":
                    break
        except EOFError:
            key = ""  # the test process has gone
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await engine.aclose()
        if key:
            self._pipe.send((key, None))

    async def _generate(self, engine: Any, key: str, request: Request) -> None:
        try:
            async with contextlib.aclosing(engine.generate(request)) as outputs:
                async for output in outputs:
                    self._pipe.send((key, output))
            self._pipe.send((key, None))
        except PdserveError as error:
            self._pipe.send((key, _Raised(error)))
        except Exception as error:
            # Outside the port's contract; the test shall see it, not wait for its deadline.
            self._pipe.send((key, _Raised(PdserveError(f"{type(error).__name__}: {error}"))))
            raise
        finally:
            del self._running[key]

    async def _failed(self, engine: Any, key: str) -> None:
        self._pipe.send((key, await engine.failed()))
        del self._running[key]


def _sample(name: str) -> float:
    from prometheus_client import REGISTRY

    return sum(s.value for metric in REGISTRY.collect() for s in metric.samples if s.name == name)
