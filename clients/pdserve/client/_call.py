"""What every generating call takes, and one request made of it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.api.serving.v1 import serving_pb2
from pdserve.client import _codec
from pdserve.client import _types as t
from pdserve.rpc import errors

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class CallFields(t.SamplingFields, total=False):
    """Keyword arguments of generate, chat, stream and stream_chat, beside those of `Sampling`."""

    model: str
    """As list_models names it; empty where the deployment has one model."""
    sampling: t.Sampling | None
    """The base that the sampling keywords go over."""
    mode: t.Mode | None
    """None: the deployment's default."""
    route: t.Route | None
    """None: the deployment's default."""
    on_failure: t.FailurePolicy | None
    """None: the deployment's default."""
    request_id: str
    """For logs, at most 128 printable characters; empty: the proxy makes one."""
    timeout: float | None
    """Seconds for the whole call with its retries; None or absent: the client's."""
    traceparent: str
    """W3C trace context that the request's trace continues."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, ready to be sent."""

    request: serving_pb2.GenerateRequest
    timeout: float | None
    """Seconds; None: the client's."""
    metadata: tuple[tuple[str, str], ...]


def build(
    fields: Mapping[str, Any], *, prompt: _codec.Prompt | None = None, messages: _codec.Messages | None = None
) -> Call:
    """A call from the keyword arguments `CallFields` and either a prompt or messages.

    Raises:
        InvalidRequest: a value that cannot be sent, by name; EmptyPrompt and UnknownField are kinds of it.
    """
    rest = dict(fields)
    traceparent = rest.pop("traceparent", "")
    if traceparent and not _TRACEPARENT.fullmatch(traceparent):
        raise errors.InvalidRequest(f"traceparent {traceparent!r} is not a W3C trace context", field="traceparent")
    timeout = check_timeout(rest.pop("timeout", None))
    request = _codec.request(
        prompt=prompt,
        messages=messages,
        model=rest.pop("model", ""),
        sampling=rest.pop("sampling", None),
        mode=rest.pop("mode", None),
        route=rest.pop("route", None),
        on_failure=rest.pop("on_failure", None),
        request_id=rest.pop("request_id", ""),
        fields=rest,
    )
    return Call(request, timeout, (("traceparent", traceparent),) if traceparent else ())


def check_timeout(timeout: float | None) -> float | None:
    """The timeout itself.

    Raises:
        InvalidRequest: not a positive, finite number of seconds.
    """
    if timeout is not None and not 0 < timeout < math.inf:  # false for NaN too
        raise errors.InvalidRequest(f"timeout is {timeout}: a positive number of seconds", field="timeout")
    return timeout
