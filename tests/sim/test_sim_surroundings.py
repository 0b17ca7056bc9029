"""What stands round the fast path: reflection and health of every server, stock instances, a daemon that restarts."""

import asyncio
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.kvd.limits import Limits
from pdserve.rpc import errors
from pdserve.rpc.channel import aio_channel
from tests.sim.fleet import Fleet, Launch, Prompt

BOTH = pytest.mark.parametrize("mode", ["read", "write"])
STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def listed(channel: grpc.aio.Channel) -> set[str]:
    """The services that reflection names."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=5)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    return {service.name for service in answer.list_services_response.service}


async def health(channel: grpc.aio.Channel, service: str) -> str:
    """What health says of a service."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_every_server_says_what_it_serves(fleet: Fleet) -> None:
    """Reflection lists each server's own services, health and itself; health of each, and of all, is SERVING."""
    servers = {
        fleet.proxy.addresses.grpc: {"pdserve.api.serving.v1.Inference"},
        fleet.card(fleet.prefills[0]).address: {"pdserve.api.prefill.v1.Prefill"},
        fleet.card(fleet.decodes[0]).address: {"pdserve.api.decode.v1.Decode"},
        f"unix:{fleet.kvd.socket}": {"pdserve.api.kvd.v1.Kvd", "pdserve.api.kvd.v1.Operator"},
    }
    for address, services in servers.items():
        async with aio_channel(address) as channel:
            assert await listed(channel) == services | STANDARD
            for name in ("", *services):
                assert await health(channel, name) == "SERVING"


async def test_a_stock_instance_is_listed_and_not_routed_to(fleet: Fleet, prompt: Prompt) -> None:
    """vLLM's own MORI-IO map, without our keys: foreign, with the reason, and no request goes there."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(f"tcp://{fleet.proxy.addresses.registration}")
        for kind, port in (("P", 8100), ("D", 8200)):
            beat = {
                "type": kind,
                "http_address": f"127.0.0.1:{port}",
                "zmq_address": "host:127.0.0.1,handshake:1,notify:2",
                "dp_size": 1,
                "tp_size": 1,
                "transfer_mode": "READ",
            }
            await socket.send(msgspec.msgpack.encode(beat))
        await fleet.until(lambda: len(fleet.proxy.registry.strangers()) == 2)
    finally:
        socket.close()
        context.term()
    engines = (await fleet.client.topology()).engines
    foreign = [engine for engine in engines if engine.state == "foreign"]
    assert {(engine.role, engine.address) for engine in foreign} == {
        ("prefill", "127.0.0.1:8100"),
        ("decode", "127.0.0.1:8200"),
    }
    assert all("MORI-IO" in engine.excluded_because for engine in foreign)
    ours = {service.engine_id for service in (*fleet.prefills, *fleet.decodes)}
    for _ in range(4):
        answer = await fleet.ask(prompt(40))
        assert {answer.prefill_engine_id, answer.decode_engine_id} == ours


def attached(fleet: Fleet) -> bool:
    """Whether every process of every engine has a stream to the kvd that runs now, and its memory is there."""
    node = fleet.kvd.node
    services = (*fleet.prefills, *fleet.decodes)
    members = [list(node.attachments.of(service.engine_id)) for service in services]
    entries = [node.registry.get(service.engine_id) for service in services]
    return all(len(m) == 3 and all(each.connected for each in m) for m in members) and all(
        entry is not None and entry.mapped for entry in entries
    )


@BOTH
async def test_kvd_is_restarted_while_nothing_moves(fleet: Fleet, prompt: Prompt, mode: str) -> None:
    """Engines attach again under their own ids, with their memory, and the next hand-over works; a stream that was
    running never noticed."""
    stream = fleet.stream(prompt(40), mode=mode, max_tokens=50)
    await anext(stream)
    fleet.decodes[0].steps.shut()
    await fleet.until(lambda: not fleet.kvd.node.transfers.book.transfers)
    epoch = fleet.kvd.node.epoch
    await fleet.restart_kvd()
    assert fleet.kvd.node.epoch != epoch
    await fleet.until(lambda: attached(fleet))
    fleet.decodes[0].steps.open()
    assert len((await stream.completion()).token_ids) == 50
    tokens = prompt(100)
    answer = await fleet.ask(tokens, mode=mode)
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.fallbacks, answer.recomputed_tokens) == (0, 0)


@BOTH
@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
async def test_kvd_is_restarted_under_a_transfer(launch: Launch, prompt: Prompt, mode: str, on_failure: str) -> None:
    """What was in flight gets a typed error at once, or is made good: the same tokens. Nothing is left of it in the
    new daemon, and the engines have their blocks."""
    fleet = await launch(bandwidth=1e12)
    fleet.link.shut()
    tokens = prompt(100)
    asked = asyncio.create_task(fleet.ask(tokens, mode=mode, on_failure=on_failure))
    await fleet.link.reached()
    stopped = asyncio.create_task(fleet.restart_kvd())
    await asyncio.sleep(0)
    fleet.link.open()
    await stopped
    if on_failure == "fail":
        error: Any = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(error[0], errors.KvdUnavailable), error
    else:
        answer = await asked
        assert answer.token_ids == await fleet.alone(tokens)
        assert answer.fallbacks >= 1
    await fleet.until(lambda: attached(fleet))
    await fleet.settled(10)
    assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)


async def test_requests_while_kvd_is_away(launch: Launch, prompt: Prompt) -> None:
    """They end with a typed error as soon as the engines have given kvd up; it works again once kvd is back. What
    ZMQ had kept of notices for the old daemon is chunks of nobody to the new one, which drops them after a while."""
    fleet = await launch(limits=Limits(park=2.0))
    await fleet.stop_kvd()
    both = (fleet.ask(prompt(100), mode=mode) for mode in ("read", "write"))
    for error in await asyncio.gather(*both, return_exceptions=True):
        assert isinstance(error, errors.KvdUnavailable), error
    await fleet.restart_kvd()
    await fleet.until(lambda: attached(fleet))
    for mode in ("read", "write"):
        tokens = prompt(100)
        assert (await fleet.ask(tokens, mode=mode)).token_ids == await fleet.alone(tokens)
