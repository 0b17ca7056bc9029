"""What tests ask of a fleet, and what it may not leave behind."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc

from pdserve.client import AsyncStream, Completion
from pdserve.engine.port import Output, Request, Sampling
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.proxy.types import EngineCard
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import PdserveError
from pdserve.rpc.status import to_error
from tests.sim.deployment import Deployment
from tests.sim.hosted import Service, outputs
from tests.waiting import WAIT_S, until

_USUAL: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "timeout": 2 * WAIT_S}


class Fleet(Deployment):
    """See conftest.py; made by the fixture `launch`."""

    def __init__(self, stack: AsyncExitStack, sim: SimConfig, beat_seconds: float) -> None:
        super().__init__(stack, sim, beat_seconds)
        self.corrupt = 0
        """Requests with wrong bytes that the test has arranged for."""
        self.may_expire = False
        """Whether a deadline of kvd may have run out."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._reference: SimEngine | None = None
        self._numbers = itertools.count(1)
        self._before = asyncio.all_tasks()

    # -- asking -----------------------------------------------------------------------------

    async def ask(self, prompt: Any, **fields: Any) -> Completion:
        """One request over gRPC, greedy and short where nothing else is said."""
        return await self.client.generate(prompt, **(_USUAL | fields))

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """(status, body) over HTTP; `body` bytes go out as they are."""
        sent: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(path, headers=headers, **sent) as response:
            return response.status, await response.json()

    def stream(self, prompt: Any, **fields: Any) -> AsyncStream:
        """One request over gRPC, as its tokens come."""
        return self.client.stream(prompt, **(_USUAL | fields))

    async def alone(self, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> tuple[int, ...]:
        """What one engine, that knows of no hand-over, answers."""
        if self._reference is None:
            self._reference = await SimEngine.start(self.sim.with_(num_blocks=4096, prefix_cache=False), None)
            self._stack.push_async_callback(self._reference.aclose)
        greedy = {"max_tokens": max_tokens, "temperature": 0.0} | sampling
        request = Request(f"alone-{next(self._numbers)}", tuple(prompt), Sampling(**greedy))
        return tuple(token for output in await outputs(self._reference, request) for token in output.token_ids)

    async def local(self, service: Service, prompt: Sequence[int], max_tokens: int) -> list[Output]:
        """Traffic of the engine's own, beside what comes through the services."""
        request = Request(
            f"local-{next(self._numbers)}", tuple(prompt), Sampling(max_tokens=max_tokens, temperature=0.0)
        )
        return await outputs(service.engine, request)

    # -- the services ----------------------------------------------------------------------

    def card(self, service: Service) -> EngineCard:
        """What the proxy knows of an engine: address, locator, identity."""
        entry = self.proxy.registry.get(service.engine_id)
        assert entry is not None, "the engine has left the proxy"
        return entry.card

    async def channel(self, address: str) -> grpc.aio.Channel:
        """To any server of the fleet, past the SDK; closed with the fleet."""
        if address not in self._channels:
            self._channels[address] = await self._stack.enter_async_context(aio_channel(address))
        return self._channels[address]

    @staticmethod
    async def refusal(call: Any) -> PdserveError:
        """The typed error that ends a call."""
        try:
            while await asyncio.wait_for(call.read(), WAIT_S) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return to_error(error)
        raise AssertionError("the call ended well")

    until = staticmethod(until)

    # -- what is left -----------------------------------------------------------------------

    def held(self) -> list[str]:
        """What anything still holds, in words."""
        found = []
        for service in (*self.prefills, *self.decodes):
            name = f"{service.role} {service.engine_id[:8]}"
            if service.gone:
                continue
            load = service.engine.load()
            if not service.engine.idle:
                found.append(f"{name}: {load.running} running, {load.waiting} waiting requests, or blocks on offer")
            if load.free_kv_tokens != load.total_kv_tokens:
                found.append(f"{name}: {load.total_kv_tokens - load.free_kv_tokens} KV tokens")
            if len(service.parts.calls):
                found.append(f"{name}: {len(service.parts.calls)} calls")
        found += [f"proxy: {n} tokens on {e[:8]}" for e, n in self.reserved().items() if n]
        topology = self.proxy.inference.topology()
        if topology.queued or topology.in_flight:
            found.append(f"proxy: {topology.queued} queued, {topology.in_flight} in flight")
        book = self.kvd.node.transfers.book
        counts = {
            "transfers": len(book.transfers),
            "handles": len(book.handles),
            "copies": len(book.ops),
            "orphans": len(book.orphans),
            "leases": len(self.kvd.node.leases),
        }
        return found + [f"kvd: {count} {name}" for name, count in counts.items() if count]

    def landed(self) -> int:
        """Bytes that have landed of hand-overs that go on."""
        transfers = self.kvd.node.transfers.book.transfers.values()
        return sum(consumer.bytes_landed for transfer in transfers for consumer in transfer.consumers.values())

    def producers(self) -> list[str]:
        """States of the producers' ends of hand-overs that go on."""
        transfers = self.kvd.node.transfers.book.transfers.values()
        return [transfer.producer.state.value for transfer in transfers if transfer.producer is not None]

    def consumers(self) -> list[str]:
        """States of the consumers' ends of hand-overs that go on."""
        transfers = self.kvd.node.transfers.book.transfers.values()
        return [consumer.state.value for transfer in transfers for consumer in transfer.consumers.values()]

    def copying(self) -> int:
        """Copies under way."""
        return len(self.kvd.node.transfers.book.ops)

    def reserved(self) -> dict[str, int]:
        """KV tokens that the proxy has reserved, by engine."""
        entries = self.proxy.registry.entries()
        return {entry.card.engine_id: self.proxy.ledger.reserved(entry.card.engine_id) for entry in entries}

    def ended(self) -> dict[str, int]:
        """How many handles ended at kvd, by outcome or reason."""
        return dict(self.kvd.node.transfers.book.ended)

    async def settled(self, seconds: float = WAIT_S) -> None:
        """Waits until nothing is held and checks the books.

        Raises:
            AssertionError: something is still held after `seconds`; says what.
        """
        try:
            await until(lambda: not self.held(), seconds)
        except AssertionError:
            raise AssertionError(f"still held after {seconds} s: {self.held()}") from None
        self.kvd.node.transfers.check()
        assert self.kvd.node.defects == 0
        services = [service for service in (*self.prefills, *self.decodes) if not service.gone]
        for service in services:
            service.engine.integrity()
        assert sum(service.engine.corrupt for service in services) == self.corrupt
        assert self.may_expire or "TRANSFER_EXPIRED" not in self.ended(), self.ended()

    async def close(self) -> None:
        """Everything in reverse; every block is back before, and no task is left behind."""
        try:
            self.link.open()
            for service in (*self.prefills, *self.decodes):
                service.steps.open()
            await self.settled()
        finally:
            await self._stack.aclose()
        if left := self._left():
            await asyncio.wait(left, timeout=2.0)
        left = self._left()
        assert not left, left

    def _left(self) -> set[asyncio.Task[Any]]:
        return {task for task in asyncio.all_tasks() - self._before if task is not asyncio.current_task()}


Launch = Callable[..., Awaitable[Fleet]]
"""The fixture `launch`."""
Prompt = Callable[[int], tuple[int, ...]]
"""The fixture `prompt`."""
