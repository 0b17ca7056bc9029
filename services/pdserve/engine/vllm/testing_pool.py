"""How tests come by engines: out of a pool that starts each once, or two of a pair's own.

A hand-over between tiny models takes hundredths of a second, but an engine a second or two to start, and as long to
end. The pool keeps what it has started, makes pairs of any two, and ends what was asked for longest ago where there are
too many. An engine's host, which stands in for its service, stays attached for as long as the engine is kept: kvd takes
an engine whose host has left for dead.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.engine.vllm.settings import VllmSettings
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import WAIT_S, Host, KvdOperator, Pair

MOST: Final = 16
"""Engines in a pool: some 40 processes."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What an engine is started with; in a pool, equal kinds are one engine."""

    model: Path
    args: tuple[str, ...]
    """vLLM's, without the number of ranks."""
    core: int = 0
    """The core that its first rank computes on, counted among ours; the next rank has the next. Twins differ in it."""
    ranks: int = 1

    def settings(self, kvd: KvdOperator) -> VllmSettings:
        """Of such an engine at a daemon."""
        cores = sorted(os.sched_getaffinity(0))
        cpus = tuple(cores[(self.core + rank) % len(cores)] for rank in range(self.ranks))
        ranks = ("--tensor-parallel-size", str(self.ranks)) if self.ranks > 1 else ()
        return VllmSettings(str(self.model), kvd.socket, args=(*ranks, *self.args), cpus=cpus)


@dataclass
class Member:
    """An engine, and the host that stands in for its service."""

    engine: EngineProcess
    host: Host
    holders: int = 0
    """How many use it now."""

    @classmethod
    async def start(cls, kvd: KvdOperator, kind: EngineKind) -> "Member":
        """Starts both. Raises what VllmEngine.start raises."""
        engine = await EngineProcess.start(kind.settings(kvd))
        host = Host(engine, kvd)
        try:
            await host.attachment.start(WAIT_S)
        except BaseException:
            await engine.aclose()
            raise
        return cls(engine, host)

    async def aclose(self) -> None:
        """Ends both; safe twice."""
        try:
            await self.host.attachment.aclose()
        finally:
            await self.engine.aclose()

    async def left_as_found(self, pair: Pair) -> None:
        """Fails where a block is not free again, or one request had two different ends."""
        await pair.idle(self.engine)
        assert not self.host.contradicted, "a request had two different ends"


class EnginePool:
    """Owns engines at one daemon. For one loop, and asked for one thing at a time, as tests do."""

    def __init__(self, kvd: KvdOperator, most: int = MOST) -> None:
        self._kvd = kvd
        self._most = most
        self._members: dict[EngineKind, Member] = {}  # the one asked for longest ago is the first

    @contextlib.asynccontextmanager
    async def engine(self, kind: EngineKind) -> AsyncIterator[EngineProcess]:
        """An engine; it is kept afterwards."""
        async with self._held(kind) as (member,):
            yield member.engine

    @contextlib.asynccontextmanager
    async def pair(self, prefill: EngineKind, decode: EngineKind) -> AsyncIterator[Pair]:
        """Two engines, and what drives them. Afterwards every block must be free again on both sides, and no request
        may have had two different ends."""
        async with self._held(prefill, decode) as (first, second):
            pair = _pair(self._kvd, first, second)
            yield pair
            for member in (first, second):
                await member.left_as_found(pair)

    @contextlib.asynccontextmanager
    async def pair_with_doomed(self, prefill: EngineKind, decode: EngineKind) -> AsyncIterator[Pair]:
        """As `pair`, for a test that prefill does not survive: it is started for this pair, and only decode is looked
        at afterwards."""
        async with self._held(decode) as (shared,), _ended(await Member.start(self._kvd, prefill)) as doomed:
            pair = _pair(self._kvd, doomed, shared)
            yield pair
            await shared.left_as_found(pair)

    async def aclose(self) -> None:
        """Ends all engines."""
        members = list(self._members.values())
        self._members.clear()
        await _end(members)

    @contextlib.asynccontextmanager
    async def _held(self, *kinds: EngineKind) -> AsyncIterator[list[Member]]:
        """The engines of these kinds, which are not ended meanwhile. After a failure they are: whatever it left in
        them is not the next test's."""
        members = await self._started(kinds)
        for member in members:
            member.holders += 1
        try:
            yield members
        except BaseException:
            for kind in dict.fromkeys(kinds):
                self._members.pop(kind, None)
            await _end(members)
            raise
        finally:
            for member in members:
                member.holders -= 1

    async def _started(self, kinds: Sequence[EngineKind]) -> list[Member]:
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in self._members]
        ending = self._too_many(kinds, len(missing))
        # At the same time: starts and ends have parts that keep one core busy.
        *started, ended = await asyncio.gather(
            *(Member.start(self._kvd, kind) for kind in missing), _end(ending), return_exceptions=True
        )
        for kind, one in zip(missing, started, strict=True):
            if isinstance(one, Member):
                self._members[kind] = one
        _raise_first(*started, ended)
        for kind in kinds:
            self._members[kind] = self._members.pop(kind)
        return [self._members[kind] for kind in kinds]

    def _too_many(self, wanted: Sequence[EngineKind], starting: int) -> list[Member]:
        """Those that make room for so many more; the pool has them no longer."""
        count = len(self._members) + starting - self._most
        free = [kind for kind, member in self._members.items() if not member.holders and kind not in wanted]
        return [self._members.pop(kind) for kind in free[: max(0, count)]]


@contextlib.asynccontextmanager
async def open_pair(
    kvd: KvdOperator, prefill: EngineKind, decode: EngineKind, decode_kvd: KvdOperator | None = None
) -> AsyncIterator[Pair]:
    """Two engines that start and end with the pair. `decode_kvd`: decode's daemon, where it is not prefill's."""
    started = await asyncio.gather(
        Member.start(kvd, prefill), Member.start(decode_kvd or kvd, decode), return_exceptions=True
    )
    members = [one for one in started if isinstance(one, Member)]
    try:
        _raise_first(*started)
        first, second = members
        yield _pair(kvd, first, second, decode_kvd)
    finally:
        await _end(members)


def _pair(kvd: KvdOperator, prefill: Member, decode: Member, decode_kvd: KvdOperator | None = None) -> Pair:
    hosts = {id(member.engine): member.host for member in (prefill, decode)}
    return Pair(kvd, prefill.engine, decode.engine, decode_kvd=decode_kvd, hosts=hosts)


@contextlib.asynccontextmanager
async def _ended(member: Member) -> AsyncIterator[Member]:
    try:
        yield member
    finally:
        await member.aclose()


async def _end(members: Sequence[Member]) -> None:
    """All of them at the same time: an engine takes seconds to end."""
    _raise_first(*await asyncio.gather(*(member.aclose() for member in members), return_exceptions=True))


def _raise_first(*results: object) -> None:
    for one in results:
        if isinstance(one, BaseException):
            raise one
