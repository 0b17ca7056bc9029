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
from tests.matrix import settings
from tests.matrix.control import Failpoints
from tests.matrix.logs import Log
from tests.matrix.processes import Order, Process, Zygote

ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_WHOLE_S = 10.0
"""Longest wait for a fleet to be made whole; the box may be busy."""
_POLL_S = 0.01
_ON_ITS_WAY_S = 0.02
"""Of a beat, from what it says to the proxy."""
_MOST_PRIMES = 6
"""A beat that comes late lets an engine miss its turn once."""


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
    process: Process
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
        self._zygote = zygote
        self._planted = planted
        self._prompts = itertools.count(1)
        self._closing = AsyncExitStack()

    async def aclose(self) -> None:
        """Ends the clients; the processes end with the zygote."""
        await self._closing.aclose()
        for member in self.members.values():
            member.process.close()

    # -- members ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all, and connects."""
        for name in self.where.specs:
            await self.spawn(name)
        self.client = await self._closing.enter_async_context(AsyncClient(self.where.proxy, retry=Retry(attempts=1)))
        channel = await self._closing.enter_async_context(aio_channel(f"unix:{self.where.kvd}"))
        self._operator = kvd_pb2_grpc.OperatorStub(channel)

    async def spawn(self, name: str) -> None:
        """Starts a member, or starts it again at its old address; returns when it is ready."""
        spec, before, log = self.where.specs[name], self.members.get(name), Log(self.where.log(name))
        log.mark()
        failpoints = Failpoints(self.where.failpoints(name))
        environ = {"PDSERVE_FAILPOINTS_SOCKET": str(failpoints.path)}
        process = await self._zygote.spawn(Order(spec.program, spec.argv, environ, log.path, self._planted))

        async def not_ready() -> str:
            assert process.alive, f"{name} has ended:\n{log.tail()}"
            return "" if log.events(spec.ready) else f"{name} is not ready:\n{log.tail()}"

        await until(not_ready, _WHOLE_S)
        if before is not None:
            before.process.close()
        engine_id = log.events(spec.ready)[0].get("engine_id", "")
        self.members[name] = Member(spec, failpoints, before.log if before else log, process, engine_id)

    def alive(self, name: str) -> bool:
        """Whether a member's present process has not ended."""
        return self.members[name].process.alive

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when it is gone."""
        await self.members[name].process.kill()

    async def stop(self, name: str, seconds: float = settings.STOPPED_S) -> None:
        """Stands a process still for so long."""
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
        return self.client.stream(
            tuple(prompt), mode=mode, temperature=0.0, max_tokens=settings.ANSWER, timeout=settings.ANSWER_S
        )

    async def ask(self, mode: Mode) -> tuple[tuple[int, ...], Completion]:
        """A new prompt and its answer."""
        prompt = self.prompt()
        async with self.stream(prompt, mode) as stream:
            return prompt, await stream.completion()

    # -- looking ----------------------------------------------------------------------------

    async def describe(self) -> kvd_pb2.DescribeResponse:
        """What kvd says of itself."""
        return await self._operator.Describe(kvd_pb2.DescribeRequest(), timeout=2.0)

    async def transfers(self) -> Sequence[kvd_pb2.Transfer]:
        """kvd's open transfers."""
        return (await self._operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=2.0)).transfers

    async def topology(self) -> Topology:
        """What the proxy knows of its engines."""
        return await self.client.topology(timeout=2.0)

    async def held(self, since: float | None = None) -> str:
        """What kvd, the proxy or a living engine still holds, or why that cannot be said; in words. With
        `since`, a moment of the loop's clock, engines are believed only what they said after it."""
        try:
            return "; ".join([*await self._held_at_kvd(), *await self._held_at_proxy(since)])
        except PdserveError as error:
            return f"the proxy cannot be asked: {error}"
        except grpc.aio.AioRpcError as error:
            return f"kvd cannot be asked: {error.details()}"

    async def _held_at_kvd(self) -> list[str]:
        found = [
            f"kvd: transfer {t.transfer_id.hex()[:8]} {t.producer_state} {list(t.consumer_states)}: {t.waits_for}"
            for t in await self.transfers()
        ]
        leases = await self._operator.ListLeases(kvd_pb2.ListLeasesRequest(), timeout=2.0)
        found += [f"kvd: lease {lease.lease_id} of {len(lease.block_ids)} blocks" for lease in leases.leases]
        described = await self.describe()
        found += [
            f"kvd: {region.num_blocks - region.free} blocks of {self.name_of(region.engine_id) or 'an ended engine'}"
            for region in described.regions
            if region.free != region.num_blocks
        ]
        return found + ([f"kvd: {described.defects} defects"] if described.defects else [])

    async def _held_at_proxy(self, since: float | None) -> list[str]:
        topology, now = await self.topology(), asyncio.get_running_loop().time()
        found = [
            f"{name} has not said yet what it holds"
            for engine in topology.engines
            if (name := self.name_of(engine.engine_id))
            and since
            and now - engine.beat_age_seconds < since + _ON_ITS_WAY_S
        ]
        found += [
            f"{name}: {engine.total_kv_tokens - engine.free_kv_tokens} KV tokens"
            for engine in topology.engines
            if (name := self.name_of(engine.engine_id)) and engine.free_kv_tokens != engine.total_kv_tokens
        ]
        if topology.queued or topology.in_flight:
            found.append(f"proxy: {topology.queued} queued, {topology.in_flight} in flight")
        return found

    async def not_whole(self) -> str:
        """What keeps the fleet from serving with all its members; in words."""
        if held := await self.held():
            return held
        listed = {engine.engine_id: engine.excluded_because for engine in (await self.topology()).engines}
        found = [f"{n} is not listed" for n in ENGINES if self.members[n].engine_id not in listed]
        found += [f"{self.name_of(key) or key}: {why}" for key, why in listed.items() if why or not self.name_of(key)]
        regions = sorted(region.engine_id for region in (await self.describe()).regions)
        wanted = sorted(self.members[n].engine_id for n in ENGINES for _ in range(settings.SIM.ranks))
        if regions != wanted:
            found.append("kvd has not the memory of all engines, or that of ended ones")
        return "; ".join(found)

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
        for name, member in self.members.items():
            member.process.signal(signal.SIGCONT)
            if member.process.alive:
                await member.failpoints.clear()
            else:
                await self.spawn(name)
        await until(self.not_whole, _WHOLE_S)

    async def primed(self) -> Pair:
        """The engines that the next request will be given to.

        Idle engines take turns, so that after one request on each pair the first is next.
        """
        used: list[Pair] = []
        for _ in range(_MOST_PRIMES):
            _, answer = await self.ask("read")
            used.append(Pair(self.name_of(answer.prefill_engine_id), self.name_of(answer.decode_engine_id)))
            await until(self.not_whole, _WHOLE_S)
            if len({pair.prefill for pair in used[-2:]}) == len({pair.decode for pair in used[-2:]}) == 2:
                return used[-2]
        raise AssertionError(f"idle engines do not take turns: {used}")


@contextlib.asynccontextmanager
async def running(folder: Path, planted: str = "") -> AsyncIterator[Fleet]:
    """A whole fleet; `planted` names a bug of planted.py for all its processes."""
    zygote = await Zygote.start()
    try:
        fleet = Fleet(settings.addresses(folder), zygote, planted)
        try:
            await fleet.start()
            await until(fleet.not_whole, _WHOLE_S)
            yield fleet
        finally:
            await fleet.aclose()
    finally:
        await zygote.aclose()
