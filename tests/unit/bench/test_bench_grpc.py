"""A proxy through the SDK: the SDK's own fake, real gRPC."""

import contextlib
from collections.abc import Iterator

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2
from pdserve.bench.endpoint import Asking, Described, Outcome, Trail
from pdserve.bench.over_grpc import GrpcEndpoint
from pdserve.bench.results import EngineFacts
from pdserve.client.testing import FakeProxy
from pdserve.rpc.errors import EngineDied, NoEngines, PdserveError, UnknownModel


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    """A fake with a pair of engines."""
    with FakeProxy() as fake:
        for name, role in (("p", common_pb2.ENGINE_ROLE_PREFILL), ("d", common_pb2.ENGINE_ROLE_DECODE)):
            fake.topology.engines.add(engine_id=name, role=role)
        yield fake


def finished() -> serving_pb2.Finished:
    """What a split answer of three tokens says at its end."""
    done = serving_pb2.Finished(mode=common_pb2.TRANSFER_MODE_WRITE, fallbacks=1)
    done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens = 4, 2, 3
    done.timings.parts.add(name="tokenize", seconds=0.25)
    done.timings.unattributed_seconds = 0.5
    done.transfer.transport = "shm"
    return done


async def test_one_request_through_the_sdk(proxy: FakeProxy) -> None:
    """What is asked, what is told at the end, a stamp a token."""
    proxy.answer("a", "b", "c", finished=finished())
    trail = Trail()
    async with contextlib.aclosing(GrpcEndpoint(proxy.target, Asking(mode="write"))) as endpoint:
        outcome = await endpoint.prepare([1, 2, 3, 4], 3)(trail)
    (request,) = proxy.requests
    assert list(request.token_ids.ids) == [1, 2, 3, 4]
    assert request.mode == common_pb2.TRANSFER_MODE_WRITE
    assert request.sampling.ignore_eos
    assert request.sampling.max_tokens == 3
    assert outcome == Outcome(3, 4, 2, "write", "shm", {"tokenize": 0.25}, 0.5, 1)
    assert len(trail.chunks) == 3
    assert trail.sent is not None
    assert trail.sent <= trail.chunks[0]


async def test_a_delta_of_several_tokens_is_one_chunk_and_one_of_none_is_none(proxy: FakeProxy) -> None:
    """Five tokens in two deltas with tokens: two stamps."""
    event = serving_pb2.GenerateResponse
    done = finished()
    done.usage.completion_tokens = 5
    proxy.answer_events(
        event(started=serving_pb2.Started(request_id="r")),
        event(delta=serving_pb2.Delta(token_ids=[1, 2, 3], text="abc")),
        event(delta=serving_pb2.Delta(text="")),
        event(delta=serving_pb2.Delta(token_ids=[4, 5], finish_reason=common_pb2.FINISH_REASON_LENGTH)),
        event(finished=done),
    )
    trail = Trail()
    async with contextlib.aclosing(GrpcEndpoint(proxy.target, Asking())) as endpoint:
        outcome = await endpoint.prepare("text", 5)(trail)
    assert outcome.output_tokens == 5
    assert len(trail.chunks) == 2


async def test_what_is_served(proxy: FakeProxy) -> None:
    """Model, context and engines; another model is refused."""
    async with contextlib.aclosing(GrpcEndpoint(proxy.target, Asking())) as endpoint:
        described = await endpoint.describe(5.0)
    assert described == Described("fake", 4096, (EngineFacts("p", "prefill"), EngineFacts("d", "decode")))
    async with contextlib.aclosing(GrpcEndpoint(proxy.target, Asking(model="x"))) as endpoint:
        with pytest.raises(UnknownModel, match="serves fake, not x"):
            await endpoint.describe(5.0)


@pytest.mark.parametrize("after", [0, 2])
async def test_a_failed_request_is_not_sent_again(proxy: FakeProxy, after: int) -> None:
    """Not even where the SDK would: what is measured is one attempt."""
    error: PdserveError = EngineDied("gone") if after else NoEngines("none")
    if after:
        proxy.answer(*["x"] * after, error=error)
    else:
        proxy.refuse(error)
    trail = Trail()
    async with contextlib.aclosing(GrpcEndpoint(proxy.target, Asking())) as endpoint:
        with pytest.raises(type(error)):
            await endpoint.prepare([1], 5)(trail)
    assert len(proxy.requests) == 1
    assert len(trail.chunks) == after
