"""A hosted engine: built in order, announced, drained, closed in reverse, and loud when it dies.

Fake: the proxy; the engine is the simulated one without kvd, or scripted where it must die.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.decode.__main__ import PROGRAM as DECODE
from pdserve.engine.hosting import factory, process
from pdserve.engine.hosting.factory import EngineChoice, EngineKind
from pdserve.engine.hosting.program import Program, read
from pdserve.engine.hosting.testing import ScriptedEngine
from pdserve.kvd.types import Locator
from pdserve.prefill.__main__ import PROGRAM as PREFILL
from pdserve.rpc import errors
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error
from pdserve.runtime import beats
from pdserve.runtime.beats import Beat, Reply
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import INSECURE_KEY
from pdserve.runtime.lifecycle import Shutdown
from pdserve.runtime.signing import Kind, Signer
from pdserve.runtime.testing import FakeProxy

SIGNER = Signer(INSECURE_KEY)
SIM = ("--engine", "sim", "--role", "both", "--model", "tiny", "--beat-seconds", "0.02")
OK = Reply(ok=True)


class World:
    """One decode service, run in this process."""

    def __init__(self, proxy: FakeProxy, shutdown: Shutdown, task: asyncio.Task[None], first: Beat) -> None:
        self.proxy, self.shutdown, self.task, self.first = proxy, shutdown, task, first
        self.channel = aio_channel(first.grpc_address)
        self.stub = decode_pb2_grpc.DecodeStub(self.channel)

    def ask(self, max_tokens: int = 4) -> Any:
        """A prompt without a source."""
        return self.stub.Decode(
            decode_pb2.DecodeRequest(
                request_id="r", prompt_token_ids=[65, 66], sampling=common_pb2.SamplingParams(max_tokens=max_tokens)
            ),
            timeout=20,
        )

    async def health(self) -> int:
        """What grpc.health.v1 says of the service."""
        request = health_pb2.HealthCheckRequest(service=DECODE.service)
        return int((await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=5)).status)

    async def beat(self, state: str) -> Beat:
        """The first beat that says so."""
        while (beat := await self.proxy.answer(OK, Clock().unix())).state != state:
            pass
        return beat


@asynccontextmanager
async def hosted(*argv: str) -> AsyncIterator[World]:
    """Starts it, and stops it however the test left it."""
    proxy, shutdown = FakeProxy(SIGNER), Shutdown()
    plan = read(DECODE, [*SIM, "--proxy", proxy.address, *argv])
    task = asyncio.create_task(process.serve(DECODE, plan, shutdown))
    beat = asyncio.create_task(proxy.answer(OK, Clock().unix()))
    await asyncio.wait({task, beat}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        beat.cancel()
        task.result()
    world = World(proxy, shutdown, task, await beat)
    try:
        yield world
    finally:
        shutdown.request()
        shutdown.request()
        await asyncio.wait({task}, timeout=10)
        assert task.done()
        if not task.cancelled() and task.exception():
            assert isinstance(task.exception(), errors.PdserveError)
        await world.channel.close()
        proxy.close()


async def rest(call: Any) -> None:
    """Reads a call to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def until_serving(world: World) -> None:
    """Health follows the registration by a moment."""
    request = health_pb2.HealthCheckRequest(service=DECODE.service)
    watch = health_pb2_grpc.HealthStub(world.channel).Watch(request, timeout=5)
    while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    watch.cancel()


async def test_a_hosted_engine_announces_itself_and_answers() -> None:
    """The proxy learns all it needs to route; health is SERVING; a prompt is answered."""
    async with hosted() as world:
        first = world.first
        assert (first.role, first.type, first.model, first.tokenizer) == ("both", "D", "tiny", "bytes")
        assert (first.state, first.beat, first.tp_size, first.block_size) == ("ready", 1, 1, 16)
        assert first.free_kv_tokens == first.total_kv_tokens == 512 * 16
        assert first.http_address == first.grpc_address
        locator = Locator(first.engine_id, "", first.identity, first.layout)
        signed = SIGNER.verify(Kind.LOCATOR, first.locator, Clock().unix())
        assert msgspec.msgpack.decode(signed, type=Locator) == locator
        await until_serving(world)
        events = [message.WhichOneof("event") async for message in world.ask()]
        assert events == ["tokens"] * 4 + ["finished"]
        later = await world.beat("ready")
        while not later.steps:
            later = await world.beat("ready")
        assert later.beat > first.beat
    assert world.task.result() is None


async def test_the_first_request_to_end_drains() -> None:
    """The proxy hears of it at once, new requests are refused, the open one ends well, then comes bye."""
    # 20 ms a step: the answer takes longer than the rest of the test, on a busy machine too.
    async with hosted("--sim-cost-decode-base", "0.02") as world:
        call = world.ask(max_tokens=100)
        assert (await call.read()).HasField("tokens")
        world.shutdown.request()
        await world.beat("draining")
        assert await world.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = world.ask()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await refused.read()
        assert isinstance(to_error(raised.value), errors.Draining)
        seen = 1
        while (message := await call.read()) is not grpc.aio.EOF:
            seen += message.HasField("tokens")
        assert seen == 100
        await world.beat("bye")
        await asyncio.wait_for(world.task, 5)


async def test_the_second_request_to_end_stops() -> None:
    """Open requests are cut off with an error that sends them elsewhere."""
    async with hosted("--sim-cost-decode-base", "0.02") as world:
        call = world.ask(max_tokens=4000)
        await call.read()
        world.shutdown.request()
        world.shutdown.request()
        await world.beat("bye")
        await asyncio.wait_for(world.task, 5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rest(call)
        assert isinstance(to_error(raised.value), errors.Draining)


async def test_a_drain_is_cut_short_by_its_deadline() -> None:
    """A request that outlasts it does not keep the process."""
    async with hosted("--sim-cost-decode-base", "0.02", "--drain-seconds", "0.05") as world:
        call = world.ask(max_tokens=4000)
        await call.read()
        world.shutdown.request()
        await asyncio.wait_for(world.task, 5)


async def test_a_dead_engine_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loudly, with its reason, and with a bye to the proxy."""
    engine = ScriptedEngine()

    async def build(choice: EngineChoice) -> ScriptedEngine:
        return engine

    monkeypatch.setattr(factory, "build_engine", build)
    async with hosted() as world:
        engine.die("out of memory")
        await world.beat("bye")
        with pytest.raises(errors.EngineDied, match="out of memory"):
            await asyncio.wait_for(world.task, 5)
    assert engine.closed


async def test_a_refused_registration_ends_the_service() -> None:
    """It would serve nobody; the reason is the proxy's."""
    proxy = FakeProxy(SIGNER)
    plan = read(DECODE, [*SIM, "--proxy", proxy.address])
    task = asyncio.create_task(process.serve(DECODE, plan, Shutdown()))
    await proxy.answer(beats.refusal(errors.IncompatibleEngines("dtype differs")), Clock().unix())
    with pytest.raises(errors.IncompatibleEngines, match="dtype differs"):
        await asyncio.wait_for(task, 5)
    proxy.close()


async def test_a_taken_port_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine that was already there is closed."""
    engine = ScriptedEngine()

    async def build(choice: EngineChoice) -> ScriptedEngine:
        return engine

    async with hosted() as world:
        monkeypatch.setattr(factory, "build_engine", build)
        port = world.first.grpc_address.rpartition(":")[2]
        plan = read(DECODE, [*SIM, "--port", port])
        with pytest.raises(errors.ConfigError, match="cannot bind"):
            await process.serve(DECODE, plan, Shutdown())
    assert engine.closed


async def test_a_missing_kvd_ends_the_start(tmp_path: Path) -> None:
    """Before anything is served."""
    plan = read(PREFILL, ["--engine", "sim", "--kvd-socket", str(tmp_path / "none"), "--kvd-seconds", "0.2"])
    with pytest.raises(errors.KvdUnavailable):
        await asyncio.wait_for(process.serve(PREFILL, plan, Shutdown()), 30)


def test_what_follows_two_dashes_is_vllm_s() -> None:
    """Untouched, also where it looks like ours."""
    argv = ["--model", "m", "--kvd-socket", "/k", "--", "--max-model-len", "512", "--port", "1"]
    plan = read(PREFILL, argv)
    assert plan.engine.config.engine is EngineKind.VLLM
    assert plan.engine.passthrough == ("--max-model-len", "512", "--port", "1")
    assert (plan.host.port, plan.role) == (0, "prefill")


def test_the_sim_s_shape_and_speed_have_flags() -> None:
    """Its name is the model's."""
    argv = ["--engine", "sim", "--role", "both", "--served-model-name", "x", "--sim-layers", "7"]
    plan = read(DECODE, [*argv, "--sim-cost-prefill-base", "0.5"])
    assert (plan.engine.sim.model, plan.engine.sim.layers, plan.engine.sim.cost.prefill_base) == ("x", 7, 0.5)


BAD_FLAGS: dict[str, tuple[Program[Any], list[str], str]] = {
    "decode without kvd": (DECODE, ["--engine", "sim"], "--kvd-socket"),
    "prefill without kvd": (PREFILL, ["--engine", "sim"], "--kvd-socket"),
    "odd role": (DECODE, ["--engine", "sim", "--role", "prefill", "--kvd-socket", "/k"], "no role prefill"),
    "vllm's arguments for sim": (DECODE, [*SIM, "--", "--max-model-len", "4"], "max-model-len"),
    "sim's flags for vllm": (DECODE, ["--kvd-socket", "/k", "--sim-layers", "4"], "--sim-layers"),
    "cores for sim": (DECODE, [*SIM, "--cpus", "0"], "--cpus"),
    "odd proxy": (DECODE, [*SIM, "--proxy", "nowhere"], "HOST:PORT"),
    "odd port": (DECODE, [*SIM, "--port", "70000"], "70000"),
    "odd shape": (DECODE, [*SIM, "--sim-block-bytes", "100"], "block_bytes"),
    "odd beat": (DECODE, [*SIM, "--beat-seconds", "0"], "beat_seconds"),
    "odd deadline": (DECODE, [*SIM, "--settle-seconds", "0"], "above 0"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_flags_that_cannot_work_are_config_errors(name: str) -> None:
    """Before an engine is started."""
    program, argv, words = BAD_FLAGS[name]
    with pytest.raises(errors.ConfigError, match=words):
        read(program, argv)


async def test_odd_cores_are_refused_when_the_engine_is_built() -> None:
    """The list is read by its adapter's side, before vLLM is imported."""
    with pytest.raises(errors.ConfigError, match="--cpus"):
        factory._cpus("0,x")
    assert factory._cpus("0,3") == (0, 3)
