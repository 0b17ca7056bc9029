"""What every log line within a call says: the request, its trace, the transfer."""

from typing import Any

import grpc

from pdserve.runtime.log import about
from pdserve.runtime.telemetry import traceparent


def about_call(context: grpc.aio.ServicerContext[Any, Any], request_id: str, transfer_id: bytes) -> None:
    """To be said first in a handler. Without a good `traceparent` there is no trace to be named."""
    about(request_id=request_id, transfer_id=transfer_id, trace_id=trace_id(context))


def trace_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Of the caller's trace; empty: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == traceparent.HEADER and isinstance(value, str):
            caller = traceparent.parse(value)
            return caller.trace_id if caller is not None else ""
    return ""
