"""Request bodies of the OpenAI face, decoded strictly: what is not honoured is refused by name (`unsupported.py`)."""

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pdserve.proxy.http.unsupported import IGNORED, UNSUPPORTED, UNSUPPORTED_IN_MESSAGE
from pdserve.proxy.types import Ask, Chat, Mode, OnFailure, Prompt, Route, Sampling, TokenIds, Turn
from pdserve.rpc.errors import EmptyPrompt, InvalidRequest, UnknownField, UnsupportedParameter

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; chat runs to the context's end."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None


class Extras(msgspec.Struct, forbid_unknown_fields=True):
    """What OpenAI's API has no place for: the body's `pdserve` object."""

    mode: Mode | None = None
    route: Route | None = None
    on_failure: OnFailure | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None


class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request have."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    pdserve: Extras | None = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoded request, and how its answer is wanted."""

    ask: Ask
    stream: bool
    include_usage: bool


B = TypeVar("B", bound=Common)

_completion = msgspec.json.Decoder(CompletionBody)
_chat = msgspec.json.Decoder(ChatBody)
_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")


def completion(body: bytes, request_id: str = "", traceparent: str = "") -> Asked:
    """Decodes a completion request.

    Raises:
        InvalidRequest and its kinds: not JSON, a wrong type, an unknown or unsupported parameter.
    """
    found = _decode(_completion, CompletionBody, body)
    most = COMPLETION_TOKENS if found.max_tokens is None else found.max_tokens
    return _asked(found, _text_prompt(found.prompt), most, found.logprobs, request_id, traceparent)


def chat(body: bytes, request_id: str = "", traceparent: str = "") -> Asked:
    """Decodes a chat request.

    Raises:
        InvalidRequest and its kinds: not JSON, a wrong type, an unknown or unsupported parameter.
    """
    found = _decode(_chat, ChatBody, body)
    if found.max_tokens is not None and found.max_completion_tokens not in (None, found.max_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    if found.top_logprobs is not None and not found.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (found.top_logprobs or 0) if found.logprobs else None
    most = found.max_tokens if found.max_tokens is not None else found.max_completion_tokens
    turns = tuple(_turn(index, message) for index, message in enumerate(found.messages or ()))
    return _asked(found, Chat(turns), most, logprobs, request_id, traceparent)


def _asked(
    body: Common, prompt: Prompt, max_tokens: int | None, logprobs: int | None, request_id: str, traceparent: str
) -> Asked:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    extras = body.pdserve or Extras()
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k == -1 else body.top_k,  # vLLM's way to say "all"
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=1 if body.n is None else body.n,
        logprobs=logprobs,
    )
    ask = Ask(
        prompt=prompt,
        request_id=request_id,
        model=body.model,
        sampling=sampling,
        mode=extras.mode,
        route=extras.route,
        on_failure=extras.on_failure,
        traceparent=traceparent,
    )
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return Asked(ask, bool(body.stream), usage)


def _text_prompt(prompt: str | list[str | int | list[int]] | None) -> Prompt:
    """One prompt: a string, token ids, or a list that holds one of either."""
    if prompt is None or prompt == []:
        raise EmptyPrompt("the request has no prompt", param="prompt")
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return TokenIds(tuple(ids))
    if len(prompt) > 1:
        raise UnsupportedParameter("several prompts in one request; send one request each", param="prompt")
    only = prompt[0]
    return only if isinstance(only, str) else TokenIds(tuple(only) if isinstance(only, list) else (only,))


def _turn(index: int, message: Message) -> Turn:
    for name, nothing in UNSUPPORTED_IN_MESSAGE.items():
        if getattr(message, name) not in nothing:
            raise UnsupportedParameter(f"messages[{index}].{name} is not supported", param=f"messages[{index}].{name}")
    content = message.content
    if isinstance(content, list):
        content = "".join(_part(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
    if content is None:
        raise InvalidRequest(f"messages[{index}].content must be text", param=f"messages[{index}].content")
    return Turn(message.role, content)


def _part(where: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind != "text":
        raise UnsupportedParameter(f"{where} is of type {kind!r}; only text is supported", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _decode(decoder: msgspec.json.Decoder[B], kind: type[B], body: bytes) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise _typed(error) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    # Off the fast path: the body has names that the struct has not.
    raw: dict[str, Any] = msgspec.json.decode(body)
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if name in kind.__struct_fields__:
            kept[name] = value
        elif name in UNSUPPORTED:
            if value not in UNSUPPORTED[name]:
                raise UnsupportedParameter(f"{name} is not supported", param=name)
        elif name not in IGNORED:
            raise UnknownField(f"there is no parameter {name[:128]!r}", param=name[:128])
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _typed(error) from None


def _typed(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"."""
    message = str(error)
    unknown = _UNKNOWN.search(message)
    if unknown:
        name, where = unknown.groups()
        param = f"{where}.{name}" if where else name
        return UnknownField(f"there is no parameter {param[:128]!r}", param=param[:128])
    found = re.search(r"at `\$\.?([^`]*)`", message)
    param = found[1] if found else ""
    return InvalidRequest(message, param=param) if param else InvalidRequest(message)
