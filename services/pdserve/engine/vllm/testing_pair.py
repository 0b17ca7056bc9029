"""Two vLLM engines as their services would drive them: for tests and benchmarks on one host.

`Pair` asks both engines as a prefill and a decode service would, signs what they would sign, and
hears kvd as their host. No proxy, no gRPC between the two: what goes wrong here is the engines' or
kvd's.
"""

import asyncio
import contextlib
import copy
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import grpc
import msgspec
from msgspec.structs import replace as replace_struct

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.engine.port import Consume, Output, Produce, Request, Sampling
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.kvd.client import Cancel, End, Hello, Participant
from pdserve.kvd.client.aio import AsyncAttachment
from pdserve.kvd.types import Mode, Ticket
from pdserve.runtime.config import INSECURE_KEY
from pdserve.runtime.signing import Kind, Signer

GREEDY: Final = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
FIRST: Final = replace(GREEDY, max_tokens=1)
"""What a prefill leg asks for."""
WAIT_S: Final = 15.0
"""Longest wait for anything that should come at once."""

Prompt = tuple[int, ...]


class KvdOperator:
    """A kvd, for its operator."""

    def __init__(self, socket: str, peer_address: str = "") -> None:
        """`peer_address`: where other nodes' daemons reach it; empty: it has no peers."""
        self.socket = socket
        self.address = peer_address or socket
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}")
        self.operator = kvd_pb2_grpc.OperatorStub(self._channel)

    async def ready(self) -> None:
        """Returns when it answers."""
        await self.operator.Describe(kvd_pb2.DescribeRequest(), timeout=WAIT_S, wait_for_ready=True)

    async def regions(self) -> int:
        """Ranks whose memory it has."""
        return len((await self.operator.Describe(kvd_pb2.DescribeRequest(), timeout=WAIT_S)).regions)

    async def knows(self, engine_id: str) -> bool:
        """Whether it has memory of an engine."""
        described = await self.operator.Describe(kvd_pb2.DescribeRequest(), timeout=WAIT_S)
        return any(region.engine_id == engine_id for region in described.regions)

    async def held(self, engine_id: str) -> int:
        """Blocks of an engine that are not free."""
        described = await self.operator.Describe(kvd_pb2.DescribeRequest(), timeout=WAIT_S)
        regions = [region for region in described.regions if region.engine_id == engine_id]
        assert all(r.free + r.leased + r.in_flight + r.quarantined == r.num_blocks for r in regions), regions
        return sum(region.num_blocks - region.free for region in regions)

    async def transfer(self, transfer_id: bytes) -> kvd_pb2.Transfer | None:
        """A transfer that is open."""
        listed = await self.operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=WAIT_S)
        return next((one for one in listed.transfers if one.transfer_id == transfer_id), None)

    async def leased(self, transfer_id: bytes) -> list[int]:
        """The producer's blocks of a transfer that is open."""
        listed = await self.operator.ListLeases(kvd_pb2.ListLeasesRequest(), timeout=WAIT_S)
        return [block for lease in listed.leases if lease.transfer_id == transfer_id for block in lease.block_ids]

    async def aclose(self) -> None:
        """Ends the channel."""
        await self._channel.close()


class Host:
    """What a service's host hears of its engine."""

    def __init__(self, engine: EngineProcess, kvd: KvdOperator) -> None:
        hello = Hello(engine.info.engine_id, Participant.HOST, engine.info.identity, ranks=engine.info.ranks)
        self.attachment = AsyncAttachment(kvd.socket, hello, on_end=self._on_end)
        self._ends: dict[tuple[bytes, int], asyncio.Future[End]] = {}
        self._heard: dict[str, End] = {}
        self.contradicted: list[str] = []
        """Handles of which two different ends were told; the same one may be told again."""

    def end(self, transfer_id: bytes, consumer: int = -1) -> "asyncio.Future[End]":
        """The end of the producer (-1) or of a consumer."""
        key = (transfer_id, consumer)
        if key not in self._ends:
            self._ends[key] = asyncio.get_running_loop().create_future()
        return self._ends[key]

    def _on_end(self, end: End) -> None:
        if self._heard.setdefault(end.handle, end) != end:
            self.contradicted.append(end.handle)
        future = self.end(end.transfer_id, -1 if end.producer else end.consumer)
        if not future.done():  # a transfer used twice has a second request, with an end of its own
            future.set_result(end)


@dataclass
class Answer:
    """What came out of a request."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def last(self) -> Output:
        """The one with the finish reason."""
        return self.outputs[-1]


@dataclass
class Handover:
    """One prompt over two engines."""

    produced: Answer
    consumed: Answer
    released: End
    landed: End


class Pair:
    """Two engines and the daemon between them, or one beside each."""

    def __init__(
        self,
        kvd: KvdOperator,
        prefill: EngineProcess,
        decode: EngineProcess,
        *,
        decode_kvd: KvdOperator | None = None,
        hosts: Mapping[int, Host] | None = None,
    ) -> None:
        """`hosts`: of both engines by `id`, attached already; without, the pair has its own: `open` and `aclose`."""
        self.kvd, self.prefill, self.decode = kvd, prefill, decode
        self._kvds = {id(prefill): kvd, id(decode): decode_kvd or kvd}
        self.hosts = hosts or {id(engine): Host(engine, self._kvds[id(engine)]) for engine in (prefill, decode)}
        self._signer = Signer(INSECURE_KEY)

    async def open(self) -> None:
        """Attaches both hosts."""
        for host in self.hosts.values():
            await host.attachment.start(WAIT_S)

    async def aclose(self) -> None:
        """Leaves kvd."""
        for host in self.hosts.values():
            await host.attachment.aclose()

    def back(self) -> "Pair":
        """The same two engines, the other way; this one keeps them."""
        other = copy.copy(self)
        other.prefill, other.decode = self.decode, self.prefill
        other.kvd = self._kvds[id(other.prefill)]
        return other

    def host(self, engine: EngineProcess) -> Host:
        """The host of an engine."""
        return self.hosts[id(engine)]

    def ticket(self, transfer_id: bytes, offered: Output, expires_in: float = 60.0) -> bytes:
        """As a prefill service signs it."""
        locator = self.prefill.info.locator(self.kvd.address)
        ticket = Ticket(locator, transfer_id, offered.offered_tokens, offered.offered_blocks)
        return self._signer.sign(Kind.TICKET, msgspec.msgpack.encode(ticket), time.time() + expires_in)

    def stale_ticket(self, transfer_id: bytes, offered: Output) -> bytes:
        """Signed by the cluster, of an engine that has ended."""
        locator = replace_struct(self.prefill.info.locator(self.kvd.socket), engine_id=str(uuid.uuid4()))
        ticket = Ticket(locator, transfer_id, offered.offered_tokens, offered.offered_blocks)
        return self._signer.sign(Kind.TICKET, msgspec.msgpack.encode(ticket), time.time() + 60.0)

    def locator(self, engine: EngineProcess) -> bytes:
        """As a service registers it."""
        address = self._kvds[id(engine)].address
        return self._signer.sign(Kind.LOCATOR, msgspec.msgpack.encode(engine.info.locator(address)))

    def produce(self, mode: Mode, consumers: int = 1) -> Produce:
        """A fresh transfer's producing end."""
        peer = self.locator(self.decode) if mode is Mode.WRITE else b""
        return Produce(os.urandom(16), mode, consumers, peer)

    def consume(self, produce: Produce, offered: Output | None = None, consumer: int = 0, **more: Any) -> Consume:
        """A consuming end of the same transfer; READ needs the producer's last output."""
        if produce.mode is Mode.READ:
            assert offered is not None
            return Consume(produce.transfer_id, Mode.READ, consumer, self.ticket(produce.transfer_id, offered), **more)
        return Consume(produce.transfer_id, Mode.WRITE, consumer, peer_locator=self.locator(self.prefill), **more)

    async def hand_over(self, mode: Mode, prompt: Prompt, sampling: Sampling = GREEDY) -> Handover:
        """The whole of READ or WRITE for one prompt; a transfer that fails is given up."""
        produce = self.produce(mode)
        try:
            if mode is Mode.READ:
                produced = await ask(self.prefill, prompt, FIRST, produce)
                consumed = await ask(self.decode, prompt, sampling, self.consume(produce, produced.last))
            else:
                produced, consumed = await asyncio.gather(
                    ask(self.prefill, prompt, FIRST, produce),
                    ask(self.decode, prompt, sampling, self.consume(produce)),
                )
        except BaseException:
            self.cancel(produce.transfer_id)
            raise
        released = await self.end(self.prefill, produce.transfer_id)
        landed = await self.end(self.decode, produce.transfer_id, 0)
        return Handover(produced, consumed, released, landed)

    async def end(self, engine: EngineProcess, transfer_id: bytes, consumer: int = -1) -> End:
        """Waits for an end."""
        async with asyncio.timeout(WAIT_S):
            return await self.host(engine).end(transfer_id, consumer)

    async def reserved(self, transfer_id: bytes) -> None:
        """Returns when kvd has the consumer's blocks."""

        async def known() -> bool:
            found = await self.kvd.transfer(transfer_id)
            return found is not None and bool({"reserved", "filling"} & set(found.consumer_states))

        await until(known, "no consumer came")

    def cancel(self, transfer_id: bytes, reason: str = "CANCELLED") -> None:
        """As a service gives a transfer up."""
        self.host(self.prefill).attachment.send(Cancel(transfer_id, reason))

    async def idle(self, *engines: EngineProcess) -> None:
        """Returns when every block is free again, at kvd and in these engines, or in both where none is named."""
        for engine in engines or (self.prefill, self.decode):
            name = "prefill" if engine is self.prefill else "decode"
            await until(partial(self._free, engine), f"{name} keeps blocks")

    async def _free(self, engine: EngineProcess) -> bool:
        load = await engine.load()
        held = await self._kvds[id(engine)].held(engine.info.engine_id)
        return (load.free_kv_tokens, load.running, load.waiting, held) == (load.total_kv_tokens, 0, 0, 0)


async def until(condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(0.02)


async def ask(
    engine: EngineProcess,
    prompt: Prompt,
    sampling: Sampling = GREEDY,
    kv: Produce | Consume | None = None,
    on_output: Callable[[Output], None] = lambda output: None,
) -> Answer:
    """Runs one request to its end."""
    answer = Answer()
    request = Request(f"r-{os.urandom(6).hex()}", prompt, sampling, kv)
    async with asyncio.timeout(2 * WAIT_S), contextlib.aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            answer.outputs.append(output)
            on_output(output)
    return answer
