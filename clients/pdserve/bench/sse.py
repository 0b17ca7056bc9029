"""The chunks of an OpenAI `text_completion` stream, out of bytes as they arrive. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdserve.rpc.errors import Overloaded, PdserveError, Unavailable, from_reason

_PREFIX = b"data:"


class Details(msgspec.Struct):
    """OpenAI's `prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """OpenAI's `usage`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """One event, as far as it is looked at."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    pdserve: dict[str, Any] | None = None
    """What a pdserve proxy adds to the last chunk."""
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class Events:
    """Cuts a byte stream into its events."""

    def __init__(self) -> None:
        self.done = False
        """Whether `[DONE]` came: the answer is whole."""
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks that `data` completes.

        Raises:
            PdserveError: an event says that the request failed, or is none.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_PREFIX):  # comments, blank lines and names of events
                continue
            said = line[len(_PREFIX) :].strip()
            if said == b"[DONE]":
                self.done = True
                continue
            try:
                chunk = _decode(said)
            except msgspec.DecodeError as error:
                raise Unavailable(f"an event of the stream is no chunk: {error}", reason="BAD_ANSWER") from error
            if chunk.error is not None:
                raise refusal(0, {"error": chunk.error})
            yield chunk


def refusal(status: int, body: Any) -> PdserveError:
    """The error that a body, or an event where `status` is 0, tells of: of pdserve, of OpenAI, or of anything."""
    told = body.get("error", body) if isinstance(body, Mapping) else body
    reason = f"HTTP_{status}" if status else "STREAM_ERROR"
    if not isinstance(told, Mapping):
        return _typed(reason, status, str(told or "no more was said"))
    message = str(told.get("message") or told.get("detail") or "no more was said")
    code = told.get("code")
    # Of pdserve's reasons the class is known; a code such as vLLM's 400 says no more than the status.
    if isinstance(code, str) and code.isupper():
        return from_reason(code, message)
    return _typed(code.upper() if isinstance(code, str) and code else reason, status, message)


def _typed(reason: str, status: int, message: str) -> PdserveError:
    """A class by the status, so that an endpoint that is gone is told from a request that is wrong."""
    if status in (0, 502, 503):
        return Unavailable(message, reason=reason)
    if status == 429:
        return Overloaded(message, reason=reason)
    return from_reason(reason, message)
