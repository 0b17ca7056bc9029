"""An engine's memory and streams without an engine, moved by hand."""

import asyncio
import contextlib
import mmap
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

import msgspec
import numpy as np

from pdserve.kvd.client import AsyncAttachment, AttachConfig, End, Hello, Memory, Participant, Rank
from pdserve.kvd.client.rank import Hosts
from pdserve.kvd.notices import Chunk, LayerReady, StepBegin, StepEnd
from pdserve.kvd.types import PROTOCOL, Identity, Layout, Locator, Span, Ticket
from pdserve.runtime.signing import Kind, Signer


def plain_layout(num_blocks: int, layers: int = 2, block_bytes: int = 4096, block_size: int = 16) -> Layout:
    """Layer after layer, each `num_blocks` blocks side by side."""
    per_layer = num_blocks * block_bytes
    spans = tuple((Span(i * per_layer, block_bytes, block_bytes),) for i in range(layers))
    return Layout(block_size, num_blocks, spans)


class KvdAddress(Protocol):
    """Where a daemon is, and what signs for it."""

    @property
    def socket(self) -> str:
        """The path of its gRPC socket."""
        ...

    @property
    def signer(self) -> Signer:
        """Signs as the cluster does."""
        ...


class FakeMemory:
    """One rank's memfd, filled with noise that follows from `seed`."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.size = max(
            s.offset + s.stride * (layout.num_blocks - 1) + s.length for layer in layout.layers for s in layer
        )
        self.fd = os.memfd_create("kvd-fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._map[:] = np.random.default_rng(seed).integers(0, 256, self.size, dtype=np.uint8).tobytes()

    def given(self) -> Memory:
        """As a rank gives it to kvd."""
        return Memory(self.fd, self.size, self.layout)

    def block(self, layer: int, block: int) -> bytes:
        """The bytes of one block of one layer."""
        starts = [(s.offset + block * s.stride, s.length) for s in self.layout.layers[layer]]
        return b"".join(self._map[start : start + length] for start, length in starts)

    def fill(self, layer: int, block: int, value: int) -> None:
        """Overwrites one block of one layer with one byte value."""
        for s in self.layout.layers[layer]:
            start = s.offset + block * s.stride
            self._map[start : start + s.length] = bytes([value]) * s.length

    def prompt(self, blocks: Sequence[int]) -> list[bytes]:
        """The bytes of some blocks, over all layers, in order."""
        return [self.block(layer, block) for layer in range(len(self.layout.layers)) for block in blocks]

    def close(self) -> None:
        """Unmaps it; safe twice."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)


class FakeEngine:
    """A scheduler and workers with real streams and memory; `async with` starts and ends it."""

    def __init__(
        self,
        kvd: KvdAddress,
        *,
        ranks: int = 1,
        layout: Layout | None = None,
        identity: Identity | None = None,
        seed: int = 0,
        config: AttachConfig | None = None,
        on_end: Callable[[Participant, int, End], None] | None = None,
        give: Sequence[Memory] = (),
        hosts: Sequence[Hosts] = (),
    ) -> None:
        """`on_end` is told of each participant's ends instead of `heard`, which many would fill. `give`: what the ranks
        register instead of `memory`, as memory on a device; `hosts`: what takes kvd's orders for it."""
        self.kvd = kvd
        self.engine_id = str(uuid.uuid4())
        self.identity: Mapping[str, str] = dict(identity or {"model": "fake", "connector_protocol": str(PROTOCOL)})
        self.ranks = ranks
        self.memory = [FakeMemory(layout or plain_layout(64), seed * 1000 + rank) for rank in range(ranks)]
        self.workers: list[AsyncAttachment] = []
        self.rank: list[Rank] = []
        self.heard: dict[tuple[Participant, int], list[End]] = {}
        """Every end that each participant heard, duplicates too."""
        self._news = asyncio.Event()
        self._config = config
        self._on_end = on_end
        self._give = give
        self._hosts = hosts
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "FakeEngine":
        for memory in self.memory:
            self._stack.callback(memory.close)
        try:
            self.scheduler = await self._attach(Participant.SCHEDULER)
            for index, memory in enumerate(self.memory):
                given = self._give[index] if self._give else memory.given()
                rank = Rank(self.engine_id, index, given, self._hosts[index] if self._hosts else None)
                self._stack.callback(rank.close)
                self.rank.append(rank)
                self.workers.append(await self._attach(Participant.WORKER, index, rank))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _attach(self, kind: Participant, index: int = 0, rank: Rank | None = None) -> AsyncAttachment:
        attachment = AsyncAttachment(
            self.kvd.socket,
            Hello(self.engine_id, kind, self.identity, self.ranks, index),
            on_end=self._hears(kind, index),
            on_welcome=rank.welcomed if rank else None,
            config=self._config,
        )
        self._stack.push_async_callback(attachment.aclose)
        await attachment.start(5.0)
        return attachment

    def _hears(self, kind: Participant, index: int) -> Callable[[End], None]:
        heard = self.heard.setdefault((kind, index), [])

        def hear(end: End) -> None:
            heard.append(end)
            self._news.set()

        def hand_on(end: End) -> None:
            assert self._on_end is not None
            self._on_end(kind, index, end)
            if kind is Participant.SCHEDULER:
                self.scheduler.forget((end.handle,))

        return hear if self._on_end is None else hand_on

    async def end_of(self, handle: str, timeout: float = 5.0) -> End:
        """The end of a handle, once every participant has heard it, each of them once.

        Raises:
            TimeoutError: not within `timeout` seconds.
            AssertionError: a participant heard it twice, or they heard different ones.
        """
        return await self._end_of(handle, timeout, tuple(self.heard))

    async def scheduler_end_of(self, handle: str, timeout: float = 5.0) -> End:
        """The end of a handle as the scheduler heard it; the others may not, where kvd is gone.

        Raises:
            TimeoutError: not within `timeout` seconds.
        """
        return await self._end_of(handle, timeout, ((Participant.SCHEDULER, 0),))

    async def _end_of(self, handle: str, timeout: float, who: Sequence[tuple[Participant, int]]) -> End:
        async with asyncio.timeout(timeout):
            while True:
                found = [[end for end in self.heard[one] if end.handle == handle] for one in who]
                if all(found):
                    assert all(one == found[0] and len(one) == 1 for one in found), found
                    return found[0][0]
                self._news.clear()
                await self._news.wait()

    def step(self, number: int, *chunks: Chunk, layers: Sequence[int] | None = None, end: bool = True) -> None:
        """Sends a whole step's notices of every rank; `layers` None: every layer."""
        for index, rank in enumerate(self.rank):
            rank.notices.send(StepBegin(self.engine_id, index, number, chunks))
            for layer in range(len(self.memory[index].layout.layers)) if layers is None else layers:
                rank.notices.send(LayerReady(self.engine_id, index, number, layer))
            if end:
                rank.notices.send(StepEnd(self.engine_id, index, number))

    def locator(self, expires_at: float = 0.0, key: bytes | None = None) -> bytes:
        """Signed as a service does, or under another key."""
        return self._signer(key).sign(Kind.LOCATOR, msgspec.msgpack.encode(self._locator()), expires_at)

    def ticket(self, transfer_id: bytes, expires_at: float = 0.0, key: bytes | None = None) -> bytes:
        """Signed as a prefill service does, or under another key."""
        ticket = Ticket(self._locator(), transfer_id, tokens=1, blocks=1)
        return self._signer(key).sign(Kind.TICKET, msgspec.msgpack.encode(ticket), expires_at)

    def _signer(self, key: bytes | None) -> Signer:
        return Signer(key) if key is not None else self.kvd.signer

    def _locator(self) -> Locator:
        welcome = self.scheduler.welcome
        address = welcome.peer_address if welcome is not None else ""
        return Locator(self.engine_id, address or f"unix:{self.kvd.socket}", dict(self.identity))
