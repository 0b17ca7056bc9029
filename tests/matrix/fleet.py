"""A fleet of real processes that serves many cases: started, looked at, hurt, and made whole again.

Real: every process, socket, signal and byte of KV. Simulated: the model and the link.
"""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.client import AsyncClient, AsyncStream, Completion, Mode, Retry, Topology
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import PdserveError
from tests.forked.forks import Forked, Zygote
from tests.matrix import settings
from tests.matrix.control import Failpoints
from tests.matrix.logs import Log
from tests.matrix.looking import Look
from tests.matrix.processes import spawn
from tests.matrix.together import together

ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_OTHER = {"prefill-0": "prefill-1", "prefill-1": "prefill-0", "decode-0": "decode-1", "decode-1": "decode-0"}
_GONE_S = 5.0
_WHOLE_S = 10.0
"""Longest wait for a fleet to be made whole; the box may be busy."""
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Pair:
    """Names of the two engines that a request is given to."""

    prefill: str
    decode: str


@dataclass(slots=True)
class Member:
    """One name of the fleet, over all its lives."""

    spec: settings.Spec
    failpoints: Failpoints
    log: Log
    process: Forked
    engine_id: str = ""
    """Of its present life; empty for kvd and proxy."""


async def until(problem: Callable[[], Awaitable[str]], seconds: float) -> float:
    """Waits until nothing is wrong any more; how long that took.

    Raises:
        AssertionError: what is still wrong after `seconds`.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while found := await problem():
        assert loop.time() - began < seconds, f"after {seconds:g} s: {found}"
        await asyncio.sleep(_POLL_S)
    return loop.time() - began


class Fleet:
    """See the module; made by `running`."""

    def __init__(self, where: settings.Addresses, zygote: Zygote, planted: str) -> None:
        self.where = where
        self.members: dict[str, Member] = {}
        self._last: Pair | None = None
        """The engines of the last request; None where that is not known, or tells nothing of whose turn is next."""
        self._hurt = False
        """Somebody was killed, stopped or started since the fleet was whole."""
        self._zygote = zygote
        self._planted = planted
        self._prompts = itertools.count(1)
        self._closing = AsyncExitStack()

    async def aclose(self) -> None:
        """Ends the clients and kills the processes."""
        try:
            await self._closing.aclose()
        finally:
            processes = [member.process for member in self.members.values()]
            for process in processes:
                process.signal(signal.SIGKILL)
            try:
                await together(process.wait(_GONE_S) for process in processes)
            finally:
                for process in processes:
                    process.close()

    # -- members ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all, and connects."""
        await self.spawn("kvd")
        await self.spawn("proxy")
        await together(self.spawn(name) for name in ENGINES)
        self.client = await self._closing.enter_async_context(AsyncClient(self.where.proxy, retry=Retry(attempts=1)))
        channel = await self._closing.enter_async_context(aio_channel(f"unix:{self.where.kvd}"))
        self._operator = kvd_pb2_grpc.OperatorStub(channel)

    async def spawn(self, name: str) -> None:
        """Starts a member, or starts it again at its old address; returns when it is ready."""
        spec, before, log = self.where.specs[name], self.members.get(name), Log(self.where.log(name))
        log.mark()
        failpoints = Failpoints(self.where.failpoints(name))
        environ = {"PDSERVE_FAILPOINTS_SOCKET": str(failpoints.path)}
        self._hurt = True
        process = spawn(self._zygote, spec.program, spec.argv, environ, log.path, self._planted)

        async def not_ready() -> str:
            assert process.alive, f"{name} has ended:\n{log.tail()}"
            return "" if log.events(spec.ready) else f"{name} is not ready:\n{log.tail()}"

        try:
            await until(not_ready, _WHOLE_S)
        except BaseException:
            process.signal(signal.SIGKILL)
            process.close()
            raise
        if before is not None:
            before.process.close()
        engine_id = log.events(spec.ready)[0].get("engine_id", "")
        self.members[name] = Member(spec, failpoints, before.log if before else log, process, engine_id)

    def alive(self, name: str) -> bool:
        """Whether a member's present process has not ended."""
        return self.members[name].process.alive

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when it is gone."""
        self._hurt = True
        self.members[name].process.signal(signal.SIGKILL)
        await self.members[name].process.wait(_GONE_S)

    async def stop(self, name: str, seconds: float = settings.STOPPED_S) -> None:
        """Stands a process still for so long."""
        self._hurt = True
        process = self.members[name].process
        process.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            process.signal(signal.SIGCONT)

    def name_of(self, engine_id: str) -> str:
        """The member whose present life has that id; empty where there is none."""
        return next((name for name in ENGINES if self.members[name].engine_id == engine_id), "")

    # -- asking -----------------------------------------------------------------------------

    def prompt(self) -> tuple[int, ...]:
        """One that was never asked before: no prefix cache shortens it."""
        number = next(self._prompts)
        return tuple((number >> (8 * i)) & 0xFF if i < 3 else (7 * i + number) % 256 for i in range(settings.PROMPT))

    def stream(self, prompt: Sequence[int], mode: Mode) -> AsyncStream:
        """A request, greedy."""
        self._last = None
        return self.client.stream(
            tuple(prompt), mode=mode, temperature=0.0, max_tokens=settings.ANSWER, timeout=settings.ANSWER_S
        )

    def went_well(self, answer: Completion) -> None:
        """The last request has this answer: with it one knows whose turn is next, in a fleet that is unhurt."""
        if not (self._hurt or answer.fallbacks or answer.continuations):
            self._last = Pair(self.name_of(answer.prefill_engine_id), self.name_of(answer.decode_engine_id))

    async def ask(self, mode: Mode) -> tuple[tuple[int, ...], Completion]:
        """A new prompt and its answer."""
        prompt = self.prompt()
        async with self.stream(prompt, mode) as stream:
            answer = await stream.completion()
        self.went_well(answer)
        return prompt, answer

    # -- looking ----------------------------------------------------------------------------

    async def describe(self) -> kvd_pb2.DescribeResponse:
        """What kvd says of itself."""
        return await self._operator.Describe(kvd_pb2.DescribeRequest(), timeout=2.0)

    async def transfers(self) -> Sequence[kvd_pb2.Transfer]:
        """kvd's open transfers."""
        return (await self._operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=2.0)).transfers

    async def _leases(self) -> Sequence[kvd_pb2.Lease]:
        return (await self._operator.ListLeases(kvd_pb2.ListLeasesRequest(), timeout=2.0)).leases

    async def topology(self) -> Topology:
        """What the proxy knows of its engines."""
        return await self.client.topology(timeout=2.0)

    async def look(self) -> Look:
        """All of it at once.

        Raises:
            PdserveError: the proxy cannot be asked.
            grpc.aio.AioRpcError: kvd cannot.
        """
        at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as asking:
                topology, described = asking.create_task(self.topology()), asking.create_task(self.describe())
                transfers, leases = asking.create_task(self.transfers()), asking.create_task(self._leases())
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        names = {self.members[name].engine_id: name for name in ENGINES}
        return Look(at, names, topology.result(), described.result(), transfers.result(), leases.result())

    async def held(self, since: float | None = None) -> str:
        """What kvd, the proxy or a living engine still holds, or why that cannot be said. `since`: see Look.held."""
        return await self._seen(lambda look: look.held(since))

    async def not_whole(self) -> str:
        """What keeps the fleet from serving with all its members, or is still held; in words."""
        return await self._seen(lambda look: look.held(None) or look.lacks())

    async def _seen(self, wrong: Callable[[Look], list[str]]) -> str:
        try:
            return "; ".join(wrong(await self.look()))
        except PdserveError as error:
            return f"the proxy cannot be asked: {error}"
        except grpc.aio.AioRpcError as error:
            return f"kvd cannot be asked: {error.details()}"

    def tails(self) -> str:
        """The ends of all logs since their marks, for people."""
        return "\n".join(f"== {name}\n{member.log.tail()}" for name, member in self.members.items())

    async def not_serving(self) -> str:
        """Why no pair of engines can be given a request; in words."""
        try:
            listed = (await self.topology()).engines
        except PdserveError as error:
            return f"the proxy cannot be asked: {error}"
        roles = {engine.role for engine in listed if not engine.excluded_because}
        return "" if roles >= {"prefill", "decode"} else f"only {sorted(roles)} can be routed to"

    # -- healing ----------------------------------------------------------------------------

    async def heal(self) -> None:
        """Makes the fleet whole: starts the dead, wakes the stopped, disarms all.

        Raises:
            AssertionError: it does not become whole; says why.
        """
        for member in self.members.values():
            member.process.signal(signal.SIGCONT)
        await self.disarm()
        await together(self.spawn(name) for name in [name for name in self.members if not self.alive(name)])
        await until(self.not_whole, _WHOLE_S)
        if self._hurt:  # who was away has had no turn yet
            self._hurt, self._last = False, None

    async def disarm(self) -> None:
        """No failpoint of the living acts any more, and none has been counted."""
        await together(member.failpoints.clear() for member in self.members.values() if member.process.alive)

    async def primed(self) -> Pair:
        """The engines that the next request will be given to, where no beat comes late.

        Idle engines take turns: they are those that the last request was not given to. Where these are not known, one
        more is asked.
        """
        if self._last is None:
            await self.ask("read")
            await until(self.not_whole, _WHOLE_S)
        assert self._last is not None, "a request in a whole fleet was disturbed"
        return Pair(_OTHER[self._last.prefill], _OTHER[self._last.decode])


@contextlib.asynccontextmanager
async def running(zygote: Zygote, folder: Path, planted: str = "") -> AsyncIterator[Fleet]:
    """A whole fleet; `planted` names a bug of planted.py for all its processes."""
    fleet = Fleet(settings.addresses(folder), zygote, planted)
    try:
        await fleet.start()
        await fleet.heal()
        yield fleet
    finally:
        await fleet.aclose()
