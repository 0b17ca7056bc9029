"""Errors cross a real gRPC boundary as the class they left as."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.rpc import errors, status
from pdserve.rpc.channel import SERVER_OPTIONS, aio_channel, sync_channel


def every_kind() -> list[type[errors.PdserveError]]:
    """All classes of the tree, the root first."""
    return list(errors.BY_REASON.values())


def test_reasons_are_unique() -> None:
    """A reason names exactly one class, or it could not come back."""

    def count(root: type[errors.PdserveError]) -> int:
        return 1 + sum(count(child) for child in root.__subclasses__())

    assert len(errors.BY_REASON) == count(errors.PdserveError)


def test_the_drawing_is_the_tree() -> None:
    """The tree at the top of the file lists every class with its code and reason, and no other."""
    drawn = {
        (fields[0], fields[1], fields[2])
        for line in (errors.__doc__ or "").splitlines()
        if len(fields := line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()) == 3
        and fields[1].isupper()
    }
    assert drawn == {(kind.__name__, kind.code, kind.reason) for kind in every_kind()}


class Refuser(serving_pb2_grpc.InferenceServicer):
    """Raises what the model field names: at once, or after one message when the text is "late"."""

    async def Generate(
        self, request: serving_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[serving_pb2.GenerateResponse]:
        """See the class."""
        if request.text == "late":
            yield serving_pb2.GenerateResponse(started=serving_pb2.Started(request_id="r"))
        if request.model == "defect":
            raise ZeroDivisionError("a defect")
        raise errors.BY_REASON[request.model]("because", detail="x")

    async def ListModels(self, request: serving_pb2.ListModelsRequest, context: Any) -> serving_pb2.ListModelsResponse:
        """Raises from a unary handler."""
        raise errors.Draining("later")

    async def GetTopology(
        self, request: serving_pb2.GetTopologyRequest, context: Any
    ) -> serving_pb2.GetTopologyResponse:
        """Never called here."""
        raise AssertionError


class Listener(kvd_pb2_grpc.KvdServicer):
    """Reads a stream of requests to its end."""

    async def Attach(
        self, request_iterator: AsyncIterator[kvd_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[kvd_pb2.AttachResponse]:
        """One answer for each request."""
        async for _ in request_iterator:
            yield kvd_pb2.AttachResponse()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[str, list[str]]]:
    """A loopback server with the interceptor; yields its target and what it was told of."""
    told: list[str] = []
    server = grpc.aio.server(
        interceptors=[status.ErrorInterceptor(lambda method, error: told.append(type(error).__name__))],
        options=list(SERVER_OPTIONS),
    )
    serving_pb2_grpc.add_InferenceServicer_to_server(Refuser(), server)
    kvd_pb2_grpc.add_KvdServicer_to_server(Listener(), server)
    target = f"unix:{tmp_path}/s"
    server.add_insecure_port(target)
    await server.start()
    try:
        yield target, told
    finally:
        await server.stop(0)


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.reason)
@pytest.mark.parametrize("when", ["at once", "late"])
async def test_round_trip(server: tuple[str, list[str]], kind: type[errors.PdserveError], when: str) -> None:
    """Class, message, metadata and code survive, also after a first message of the stream."""
    async with aio_channel(server[0]) as channel:
        call = serving_pb2_grpc.InferenceStub(channel).Generate(
            serving_pb2.GenerateRequest(model=kind.reason, text=when), timeout=5
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    error = status.to_error(caught.value)
    assert type(error) is kind
    assert (error.message, error.metadata) == ("because", {"detail": "x"})
    assert caught.value.code() is status.status_code(error)
    assert server[1] == []


async def test_a_defect_is_told_and_typed(server: tuple[str, list[str]]) -> None:
    """An error that is not ours reaches the operator's ear and the caller as INTERNAL."""
    async with aio_channel(server[0]) as channel:
        call = serving_pb2_grpc.InferenceStub(channel).Generate(serving_pb2.GenerateRequest(model="defect"), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert type(status.to_error(caught.value)) is errors.PdserveError
    assert server[1] == ["ZeroDivisionError"]


async def test_unary_and_unknown(server: tuple[str, list[str]]) -> None:
    """Unary calls are wrapped too; a method that is not there is grpc's own answer."""
    async with aio_channel(server[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await serving_pb2_grpc.InferenceStub(channel).ListModels(serving_pb2.ListModelsRequest(), timeout=5)
        assert type(status.to_error(caught.value)) is errors.Draining
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/nobody/Home", bytes, bytes)(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_is_no_message_is_an_invalid_request(server: tuple[str, list[str]]) -> None:
    """Bytes that do not parse are the caller's mistake, in every kind of call, and no defect of ours."""
    garbage, service = b"\xff\xff\xff", "/pdserve.api.serving.v1.Inference"
    async with aio_channel(server[0]) as channel:
        calls = [
            channel.unary_unary(f"{service}/ListModels", bytes, bytes)(garbage, timeout=5),
            anext(aiter(channel.unary_stream(f"{service}/Generate", bytes, bytes)(garbage, timeout=5))),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert type(status.to_error(caught.value)) is errors.InvalidRequest
        stream = channel.stream_stream("/pdserve.api.kvd.v1.Kvd/Attach", bytes, bytes)(timeout=5)
        await stream.write(b"")
        assert await stream.read() == b""
        await stream.write(garbage)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert type(status.to_error(caught.value)) is errors.InvalidRequest
    assert server[1] == []


def test_a_status_of_nobody_maps_by_code(tmp_path: Path) -> None:
    """A target where nobody listens is `Unavailable`, from the blocking client as well."""
    with sync_channel(f"unix:{tmp_path}/nobody") as channel:
        call = channel.unary_unary("/x/Y", request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=2)
    assert type(status.to_error(caught.value)) is errors.Unavailable


def test_a_reason_of_a_newer_peer_is_kept() -> None:
    """An unknown reason comes back as the root and is still there to read."""
    error = errors.from_reason("BRAND_NEW", "text", {"a": "b"})
    assert type(error) is errors.PdserveError
    assert error.metadata == {"a": "b", "reason": "BRAND_NEW"}
