"""Legs over gRPC."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from pdserve.api.decode.v1 import decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2_grpc
from pdserve.proxy import codec
from pdserve.proxy.channels import Channels
from pdserve.proxy.legs import DecodeEvent, DecodeOrder, Leg, PrefillEvent, PrefillOrder
from pdserve.proxy.types import EngineCard, Progress
from pdserve.rpc import status
from pdserve.rpc.errors import EngineDied, PdserveError, RequestCancelled, Unavailable

E = TypeVar("E")


class GrpcLegs:
    """Opens legs over the engines' channels."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def prefill(self, engine: EngineCard, order: PrefillOrder, traceparent: str, timeout: float) -> Leg[PrefillEvent]:
        """See Legs."""
        channel = self._channels.get(engine.engine_id)
        if channel is None:
            return _Unreachable(engine)
        stub = prefill_pb2_grpc.PrefillStub(channel)
        call = stub.Prefill(codec.prefill_to_wire(order), metadata=(("traceparent", traceparent),), timeout=timeout)
        return _GrpcLeg(call, codec.prefill_event, engine)

    def decode(self, engine: EngineCard, order: DecodeOrder, traceparent: str, timeout: float) -> Leg[DecodeEvent]:
        """See Legs."""
        channel = self._channels.get(engine.engine_id)
        if channel is None:
            return _Unreachable(engine)
        stub = decode_pb2_grpc.DecodeStub(channel)
        call = stub.Decode(codec.decode_to_wire(order), metadata=(("traceparent", traceparent),), timeout=timeout)
        return _GrpcLeg(call, codec.decode_event, engine)


class _GrpcLeg(Generic[E]):
    def __init__(self, call: Any, decode: Callable[[Any], E], engine: EngineCard) -> None:
        self._call = call
        self._decode = decode
        self._engine = engine
        self._cancelled: PdserveError | None = None
        self.progress: Progress | None = None

    async def receive(self) -> E | None:
        if self._cancelled is not None:
            raise self._cancelled
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self.progress = codec.progress_from_wire(status.progress(error))
            raise self._typed(error) from None
        except asyncio.CancelledError:
            # grpc raises this for a call that was cancelled locally, too: by `cancel`, or by a
            # channel that was closed because its engine is gone.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._cancelled is not None:
                raise self._cancelled from None
            raise self._gone() from None
        return None if message is grpc.aio.EOF else self._decode(message)

    def cancel(self, error: PdserveError) -> None:
        if self._cancelled is None:
            self._cancelled = error
            self._call.cancel()

    def _typed(self, error: grpc.aio.AioRpcError) -> PdserveError:
        if self._cancelled is not None:
            return self._cancelled
        typed = status.to_error(error)
        if isinstance(typed, RequestCancelled):
            return self._gone()  # not by us: the service, or the channel, has ended under the call
        if type(typed) is Unavailable:  # gRPC's own: a service that can still speak gives a reason
            return self._gone()
        typed.metadata.setdefault("engine_id", self._engine.engine_id)
        return typed

    def _gone(self) -> PdserveError:
        return EngineDied(
            f"engine {self._engine.engine_id} went away during the call", engine_id=self._engine.engine_id
        )


class _Unreachable:
    """A leg to an engine that left between its choice and the call."""

    def __init__(self, engine: EngineCard) -> None:
        self._error: PdserveError = EngineDied(f"engine {engine.engine_id} has left", engine_id=engine.engine_id)
        self.progress: Progress | None = None

    async def receive(self) -> None:
        raise self._error

    def cancel(self, error: PdserveError) -> None:
        self._error = error
