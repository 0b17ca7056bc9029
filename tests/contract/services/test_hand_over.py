"""The two services as they run, with simulated engines and a real kvd: every byte is checked by the engine.

Fake: the proxy, which is the test, and the engines' model.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.decode.__main__ import PROGRAM as DECODE
from pdserve.engine.hosting import factory, process
from pdserve.engine.hosting.factory import EngineChoice
from pdserve.engine.hosting.program import Program, read
from pdserve.engine.sim import SimEngine
from pdserve.kvd.config import INSECURE_LOOPBACK_KEY, SimConfig
from pdserve.kvd.testing import Fault, RunningKvd, running_kvd
from pdserve.prefill.__main__ import PROGRAM as PREFILL
from pdserve.rpc import errors
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error
from pdserve.runtime.beats import Beat, Reply
from pdserve.runtime.clock import Clock
from pdserve.runtime.lifecycle import Shutdown
from pdserve.runtime.signing import Signer
from pdserve.runtime.testing import FakeProxy
from tests.waiting import until

READ, WRITE = common_pb2.TRANSFER_MODE_READ, common_pb2.TRANSFER_MODE_WRITE
FAIL, RECOMPUTE = common_pb2.FAILURE_POLICY_FAIL, common_pb2.FAILURE_POLICY_RECOMPUTE
SIM = ("--engine", "sim", "--beat-seconds", "0.05", "--sim-token-budget", "64")
PROMPT = [(7 * index) % 256 for index in range(150)]
LENGTHS = [1, 2, 15, 16, 17, 150]


@dataclass
class Service:
    """One hosted engine."""

    engine: SimEngine
    beat: Beat
    channel: grpc.aio.Channel
    shutdown: Shutdown
    task: asyncio.Task[None]

    async def idle(self) -> None:
        """Waits until the engine holds nothing, not even for a hand-over."""
        await until(lambda: self.engine.idle)
        self.engine.integrity()


class Fleet:
    """kvd, one prefill and one decode service."""

    def __init__(self, kvd: RunningKvd, stack: AsyncExitStack, patch: pytest.MonkeyPatch) -> None:
        self.kvd = kvd
        self._stack = stack
        self._patch = patch

    async def open(self) -> None:
        """Starts both."""
        self.prefill = await self.host(PREFILL)
        self.decode = await self.host(DECODE)

    async def host(self, program: Program[Any], *argv: str) -> Service:
        """Runs a service in this process, and catches the engine that it builds."""
        proxy, shutdown, build = FakeProxy(Signer(INSECURE_LOOPBACK_KEY)), Shutdown(), factory.build_engine
        self._stack.callback(proxy.close)
        built: list[SimEngine] = []

        async def catch(choice: EngineChoice) -> Any:
            engine = await build(choice)
            assert isinstance(engine, SimEngine)
            built.append(engine)
            return engine

        self._patch.setattr(factory, "build_engine", catch)
        plan = read(program, [*SIM, "--kvd-socket", str(self.kvd.socket), "--proxy", proxy.address, *argv])
        task = asyncio.create_task(process.serve(program, plan, shutdown))
        beat = await proxy.answer(Reply(ok=True), Clock().unix())
        self._patch.setattr(factory, "build_engine", build)
        channel = aio_channel(beat.grpc_address)
        service = Service(built[0], beat, channel, shutdown, task)
        self._stack.push_async_callback(self._close, service)
        return service

    async def _close(self, service: Service) -> None:
        await service.channel.close()
        service.shutdown.request()
        await asyncio.wait({service.task}, timeout=10)
        assert service.task.done()

    def ask_prefill(self, transfer_id: bytes, prompt: list[int], mode: Any = READ, consumers: int = 1) -> Any:
        """Opens the prefill leg."""
        request = prefill_pb2.PrefillRequest(
            request_id="r",
            transfer_id=transfer_id,
            mode=mode,
            prompt_token_ids=prompt,
            peer_locator=self.decode.beat.locator,
            consumers=consumers,
        )
        return prefill_pb2_grpc.PrefillStub(self.prefill.channel).Prefill(request, timeout=20)

    def ask_decode(self, prompt: list[int], source: Any = None, n: int = 1, policy: Any = FAIL) -> Any:
        """Opens the decode leg."""
        sampling = common_pb2.SamplingParams(max_tokens=5, temperature=0.0, n=n)
        request = decode_pb2.DecodeRequest(
            request_id="r", prompt_token_ids=prompt, sampling=sampling, source=source, on_failure=policy
        )
        return decode_pb2_grpc.DecodeStub(self.decode.channel).Decode(request, timeout=20)

    async def read(self, prompt: list[int], n: int = 1) -> tuple["Answer", Any]:
        """A whole READ: answer, and what prefill said at its end."""
        transfer_id = os.urandom(16)
        prefill = self.ask_prefill(transfer_id, prompt, consumers=n)
        ready = (await prefill.read()).ready
        source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ready.ticket)
        answer = await collect(self.ask_decode(prompt, source, n))
        return answer, (await prefill.read()).released

    async def write(self, prompt: list[int], n: int = 1) -> tuple["Answer", Any]:
        """A whole WRITE."""
        transfer_id = os.urandom(16)
        source = decode_pb2.KvSource(transfer_id=transfer_id, mode=WRITE, peer_locator=self.prefill.beat.locator)
        decode = self.ask_decode(prompt, source, n)
        prefill = self.ask_prefill(transfer_id, prompt, WRITE, n)
        answer = await collect(decode)
        assert (await prefill.read()).HasField("ready")
        return answer, (await prefill.read()).released

    async def idle(self) -> None:
        """Nothing is held anywhere, and no byte was ever wrong."""
        for service in (self.prefill, self.decode):
            await service.idle()
            assert service.engine.corrupt == 0


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Running; at the end every block is free."""
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(running_kvd())
        fleet = Fleet(kvd, stack, monkeypatch)
        await fleet.open()
        yield fleet
        await fleet.idle()


@dataclass
class Answer:
    """What decode streamed."""

    tokens: dict[int, list[int]]
    finished: Any
    stamps: dict[str, int]


async def collect(call: Any) -> Answer:
    """Reads a decode leg to its end."""
    answer = Answer({}, None, {})
    while (message := await call.read()) is not grpc.aio.EOF:
        if message.HasField("finished"):
            answer.finished = message.finished
            continue
        answer.tokens.setdefault(message.tokens.index, []).extend(message.tokens.token_ids)
        for stamp in message.tokens.stamps.stamps:
            answer.stamps[common_pb2.CutPoint.Name(stamp.point).removeprefix("CUT_POINT_")] = stamp.monotonic_ns
    return answer


async def refused(call: Any) -> errors.PdserveError:
    """The typed error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(call)
    return to_error(raised.value)


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_an_answer_is_that_of_one_engine(fleet: Fleet, mode: str, length: int) -> None:
    """Token for token; decode computed at most the last token; kvd moved exactly the prompt's blocks."""
    prompt = PROMPT[:length]
    answer, released = await (fleet.read if mode == "read" else fleet.write)(prompt)
    alone = await collect(fleet.ask_decode(prompt))
    assert answer.tokens == alone.tokens
    assert [len(tokens) for tokens in answer.tokens.values()] == [5]
    assert answer.finished.recomputed_tokens <= 1
    facts, blocks = answer.finished.transfer, -(-length // 16)
    assert (facts.blocks, facts.kv_bytes, facts.layers, facts.ranks) == (blocks, blocks * 4 * 128, 4, 1)
    assert released.transfer.kv_bytes == facts.kv_bytes
    order = ["DECODE_RECEIVED", "DECODE_BLOCKS_RESERVED", "KV_LANDED", "DECODE_SCHEDULED", "FIRST_TOKEN_SAMPLED"]
    moments = [answer.stamps[name] for name in [*order, "DETOKENIZED"]]
    assert moments == sorted(moments)
    assert not alone.finished.HasField("transfer")


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_several_answers_take_one_transfer(fleet: Fleet, mode: str) -> None:
    """n consumers of one prefill; the producer is released once, after the last."""
    answer, released = await (fleet.read if mode == "read" else fleet.write)(PROMPT, 3)
    assert sorted(answer.tokens) == [0, 1, 2]
    assert answer.tokens[0] == answer.tokens[1] == answer.tokens[2]
    assert answer.finished.completion_tokens == 15
    assert released.transfer.kv_bytes == answer.finished.transfer.kv_bytes


async def test_many_requests_at_once(fleet: Fleet) -> None:
    """Both modes together, and nothing is left."""
    prompts = [PROMPT[:length] for length in range(3, 60, 3)]
    calls = [(fleet.read, fleet.write)[index % 2](prompt) for index, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*calls)
    assert all(len(answer.tokens[0]) == 5 for answer, _ in answers)


async def test_a_ticket_is_good_once(fleet: Fleet) -> None:
    """A second service that presents it is refused by kvd, the first is not disturbed."""
    transfer_id = os.urandom(16)
    prefill = fleet.ask_prefill(transfer_id, PROMPT)
    ticket = (await prefill.read()).ready.ticket
    source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket)
    other = await fleet.host(DECODE)
    first = await collect(fleet.ask_decode(PROMPT, source))
    assert len(first.tokens[0]) == 5
    sampling = common_pb2.SamplingParams(max_tokens=5)
    request = decode_pb2.DecodeRequest(prompt_token_ids=PROMPT, source=source, sampling=sampling, on_failure=FAIL)
    error = await refused(decode_pb2_grpc.DecodeStub(other.channel).Decode(request, timeout=20))
    assert isinstance(error, errors.TransferUsed)
    assert (await prefill.read()).HasField("released")
    await other.idle()


async def restarted(fleet: Fleet) -> Service:
    """Ends the prefill engine and hosts another; gives the ended one back."""
    ended = fleet.prefill
    await ended.engine.kill("killed by the test")
    with pytest.raises(errors.EngineDied):
        await asyncio.wait_for(asyncio.shield(ended.task), 10)
    fleet.prefill = await fleet.host(PREFILL)
    return ended


async def test_a_locator_of_an_ended_engine_is_stale(fleet: Fleet) -> None:
    """The prefill engine was restarted: its old epoch is refused at once, whatever the mode's deadlines."""
    ended = await restarted(fleet)
    source = decode_pb2.KvSource(transfer_id=os.urandom(16), mode=WRITE, peer_locator=ended.beat.locator)
    assert isinstance(await refused(fleet.ask_decode(PROMPT, source)), errors.StaleEpoch)


async def test_a_dead_producer_is_a_lost_peer(fleet: Fleet) -> None:
    """Its offer died with it; decode learns it at once, and prefill's caller too."""
    transfer_id = os.urandom(16)
    prefill = fleet.ask_prefill(transfer_id, PROMPT)
    ticket = (await prefill.read()).ready.ticket
    await restarted(fleet)
    source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket)
    assert isinstance(await refused(fleet.ask_decode(PROMPT, source)), errors.PeerLost)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await prefill.read()
    assert isinstance(to_error(raised.value), errors.Unavailable)


async def test_a_refused_decode_leg_releases_prefill_at_once(fleet: Fleet) -> None:
    """No lease has to run out: kvd tells the producer that its consumer failed."""
    transfer_id = os.urandom(16)
    prefill = fleet.ask_prefill(transfer_id, PROMPT)
    ticket = (await prefill.read()).ready.ticket
    source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket)
    assert isinstance(await refused(fleet.ask_decode([], source)), errors.EmptyPrompt)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(prefill.read(), 2)
    assert isinstance(to_error(raised.value), errors.ConsumerFailed)
    await asyncio.wait_for(fleet.prefill.idle(), 2)


async def test_a_refused_prefill_leg_tells_decode_at_once(fleet: Fleet) -> None:
    """In WRITE decode already waits, or comes later: either way it learns why."""
    for decode_first in (True, False):
        transfer_id = os.urandom(16)
        source = decode_pb2.KvSource(transfer_id=transfer_id, mode=WRITE, peer_locator=fleet.prefill.beat.locator)
        decode = fleet.ask_decode(PROMPT, source) if decode_first else None
        assert isinstance(await refused(fleet.ask_prefill(transfer_id, [], WRITE)), errors.EmptyPrompt)
        decode = decode or fleet.ask_decode(PROMPT, source)
        assert isinstance(await asyncio.wait_for(refused(decode), 2), errors.ProducerFailed)
        await asyncio.wait_for(fleet.decode.idle(), 2)


async def test_leaving_the_prefill_leg_frees_its_offer(fleet: Fleet) -> None:
    """Between the legs nothing but the open call holds it; a decode that comes later learns why."""
    transfer_id = os.urandom(16)
    prefill = fleet.ask_prefill(transfer_id, PROMPT)
    ticket = (await prefill.read()).ready.ticket
    prefill.cancel()
    await asyncio.wait_for(fleet.prefill.idle(), 2)
    source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket)
    assert isinstance(await refused(fleet.ask_decode(PROMPT, source)), errors.RequestCancelled)


async def test_leaving_the_decode_leg_frees_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the blocks are on their way: prefill's caller learns of it, and no block is free before its copy ends."""
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(running_kvd(transport="sim", sim=SimConfig(delay=0.3)))
        fleet = Fleet(kvd, stack, monkeypatch)
        await fleet.open()
        transfer_id = os.urandom(16)
        prefill = fleet.ask_prefill(transfer_id, PROMPT)
        ticket = (await prefill.read()).ready.ticket
        decode = fleet.ask_decode(PROMPT, decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket))
        await until(lambda: fleet.decode.engine.load().waiting == 1)
        decode.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(prefill.read(), 5)
        # The engine's connector and the service both give it up; kvd passes on the first reason.
        assert isinstance(to_error(raised.value), errors.ConsumerFailed | errors.RequestCancelled)
        await fleet.idle()


@pytest.fixture
async def faulty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """As `fleet`, over a link that can be made to fail."""
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(running_kvd(transport="sim"))
        fleet = Fleet(kvd, stack, monkeypatch)
        await fleet.open()
        yield fleet
        await fleet.idle()


@pytest.mark.parametrize("policy", [FAIL, RECOMPUTE])
async def test_a_failed_copy_is_recomputed_or_said(faulty: Fleet, policy: Any) -> None:
    """As the request has it: the same tokens, computed at decode, or a typed error."""
    transfer_id = os.urandom(16)
    prefill = faulty.ask_prefill(transfer_id, PROMPT)
    ticket = (await prefill.read()).ready.ticket
    source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket)
    faulty.kvd.faults.script.append(Fault.FAIL)
    decode = faulty.ask_decode(PROMPT, source, policy=policy)
    if policy == FAIL:
        assert isinstance(await refused(decode), errors.TransferFailed)
    else:
        answer = await collect(decode)
        assert answer.finished.recomputed_tokens == len(PROMPT)
        assert not answer.finished.HasField("transfer")
        assert answer.tokens == (await collect(faulty.ask_decode(PROMPT))).tokens
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await prefill.read()
    assert isinstance(to_error(raised.value), errors.TransferFailed)


@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_wrong_bytes_are_seen(faulty: Fleet, fault: Fault) -> None:
    """The negative control: a mover that lies turns these tests red."""
    transfer_id = os.urandom(16)
    prefill = faulty.ask_prefill(transfer_id, PROMPT)
    ticket = (await prefill.read()).ready.ticket
    source = decode_pb2.KvSource(transfer_id=transfer_id, mode=READ, ticket=ticket)
    faulty.kvd.faults.script.append(fault)
    with pytest.raises(errors.EngineDied, match="corrupt KV"):
        raise await refused(faulty.ask_decode(PROMPT, source))
    assert faulty.decode.engine.corrupt == 1
    faulty.decode.engine.corrupt = 0
