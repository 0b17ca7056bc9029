"""Errors on the HTTP wire: the one map from pdserve.rpc.errors to OpenAI's form."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.rpc.errors import PdserveError

# By gRPC code, so that a new class of error needs no new line: (HTTP status, OpenAI's type).
_BY_CODE: Mapping[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "ALREADY_EXISTS": (409, "conflict_error"),
    "FAILED_PRECONDITION": (409, "conflict_error"),
    "ABORTED": (503, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
    "INTERNAL": (500, "server_error"),
}


def status(error: PdserveError) -> int:
    """The HTTP status of an error."""
    return _BY_CODE[error.code][0]


def body(error: PdserveError) -> bytes:
    """OpenAI's error object; `code` is the reason, the same that gRPC clients see."""
    said: dict[str, Any] = {
        "message": error.message,
        "type": _BY_CODE[error.code][1],
        "param": error.metadata.get("param"),
        "code": error.reason,
    }
    if error.metadata:
        said["metadata"] = error.metadata
    return msgspec.json.encode({"error": said})
