"""Errors on the gRPC wire: one map out, one map back.

Format: google.rpc.Status with one google.rpc.ErrorInfo in `grpc-status-details-bin`.
"""

from __future__ import annotations  # grpc classes are generic for type checkers only

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from pdserve.api.common.v1 import error_pb2
from pdserve.rpc import errors

DETAILS_KEY = "grpc-status-details-bin"
PROGRESS_KEY = "pdserve-progress-bin"
"""Trailing metadata of a failed call of Prefill or Decode: how far it had come, a common.v1.Progress."""
DOMAIN = "pdserve"
_HTTP = "Expected SETTINGS frame"
"""What gRPC says of a peer that does not speak HTTP/2 at once."""
_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"

# What a status without an ErrorInfo means: a proxy in between, or grpc itself, made it.
_BARE: dict[grpc.StatusCode, type[errors.PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
}


def status_code(error: errors.PdserveError) -> grpc.StatusCode:
    """The gRPC code of an error's class."""
    return grpc.StatusCode[error.code]


def details(error: errors.PdserveError) -> bytes:
    """The serialised google.rpc.Status of an error."""
    info = error_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status = error_pb2.RpcStatus(
        code=status_code(error).value[0],
        message=error.message,
        details=[AnyMessage(type_url=_ERROR_INFO, value=info.SerializeToString())],
    )
    return status.SerializeToString()


def to_error(failed: grpc.RpcError) -> errors.PdserveError:
    """The typed error behind a failed call, of sync and of async clients.

    A status that carries no ErrorInfo of ours maps by its code alone.
    """
    call = cast("grpc.aio.AioRpcError", failed)  # the blocking client's error has the same three methods
    code = call.code()
    message = str(call.details() or code.name)
    if _HTTP in message:
        message += " (is this the HTTP port? The gRPC port is another)"
    for key, value in cast("Iterable[tuple[str, bytes]]", call.trailing_metadata() or ()):
        if key != DETAILS_KEY:
            continue
        try:
            status = error_pb2.RpcStatus.FromString(value)
            for detail in status.details:
                if detail.type_url == _ERROR_INFO:
                    info = error_pb2.ErrorInfo.FromString(detail.value)
                    return errors.from_reason(info.reason, status.message, info.metadata)
        except DecodeError:
            break  # not ours; the code still tells
    return _BARE.get(code, errors.PdserveError)(message)


def progress(failed: grpc.RpcError) -> bytes:
    """The serialised common.v1.Progress beside a failed call's error; empty: the service has said nothing."""
    call = cast("grpc.aio.AioRpcError", failed)
    for key, value in cast("Iterable[tuple[str, bytes]]", call.trailing_metadata() or ()):
        if key == PROGRESS_KEY:
            return value
    return b""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.PdserveError) -> NoReturn:
    """Ends a call with a typed error, beside whatever trailing metadata the handler has set."""
    said = cast("tuple[tuple[str, str | bytes], ...]", tuple(context.trailing_metadata() or ()))
    await context.abort(status_code(error), error.message, (*said, (DETAILS_KEY, details(error))))
    raise AssertionError("unreachable: abort raises")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a PdserveError that leaves a handler into its status; anything else into INTERNAL, and a
    request that is not readable into InvalidRequest.

    `unexpected` is told of errors that are not ours, before the caller gets INTERNAL.
    """

    def __init__(self, unexpected: Callable[[str, BaseException], None]) -> None:
        self._unexpected = unexpected

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler; see grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        checked: Callable[[Any], Any] = _readable_stream if handler.request_streaming else _readable
        codec = {
            "request_deserializer": _patient(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            inner_stream = handler.stream_stream or handler.unary_stream

            async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
                try:
                    async for response in inner_stream(checked(request), context):
                        yield response
                except errors.PdserveError as error:
                    await abort(context, error)
                except Exception as error:
                    if isinstance(error, grpc.aio.AbortError):
                        raise
                    self._unexpected(method, error)
                    await abort(context, errors.PdserveError(f"{type(error).__name__}: {error}"))

            # A handler may also be a coroutine that writes to the context, as grpc.health's Watch is.
            written = self._awaited(method, inner_stream, checked)
            wrapped: Any = stream if inspect.isasyncgenfunction(inner_stream) else written
            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(wrapped, **codec)
            return grpc.unary_stream_rpc_method_handler(wrapped, **codec)

        unary = self._awaited(method, handler.stream_unary or handler.unary_unary, checked)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(unary, **codec)
        return grpc.unary_unary_rpc_method_handler(unary, **codec)

    def _awaited(
        self, method: str, inner: Callable[..., Awaitable[Any]], checked: Callable[[Any], Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await inner(checked(request), context)
            except errors.PdserveError as error:
                await abort(context, error)
            except Exception as error:
                if isinstance(error, grpc.aio.AbortError):
                    raise
                self._unexpected(method, error)
                await abort(context, errors.PdserveError(f"{type(error).__name__}: {error}"))

        return call


class _Unreadable:
    """In place of a request that is no message of its type, until there is a handler that can say so:
    what a deserializer raises reaches the caller as UNKNOWN."""

    def __init__(self, error: DecodeError) -> None:
        self.error = error


def _patient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Unreadable(error)

    return read


def _readable(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise errors.InvalidRequest(f"the request cannot be read: {request.error}")
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)
