"""The one validation of a request, for both faces: the same mistake gets the same reason. Pure.

In two steps: `check_ask` before anything is spent on the request, `fit` once its tokens are counted.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.proxy.routing import Choice, room
from pdserve.proxy.types import Ask, Chat, Sampling, TokenIds
from pdserve.rpc.errors import (
    ContextExceeded,
    EmptyPrompt,
    InvalidRequest,
    NoEngines,
    PoolExceeded,
    UnknownModel,
)

MAX_REQUEST_ID = 128
MAX_STOP_CHARS = 1024
_UINT32 = 1 << 32
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the deployment allows."""

    max_n: int = 16
    max_logprobs: int = 20
    max_stop: int = 16


def resolve_model(asked: str, served: Sequence[str], *, settled: bool = True) -> str:
    """The model's name; an empty one means the only model. Not `settled`: there may be models not heard of yet.

    Raises:
        NoEngines: no engine is registered at all, or none of that model yet.
        UnknownModel: not served.
        InvalidRequest: none was named and there are several.
    """
    if not served:
        raise NoEngines("no engine is registered")
    if asked:
        if asked not in served:
            name, others = repr(asked[:MAX_REQUEST_ID]), ", ".join(served)
            if not settled:
                raise NoEngines(f"no engine of {name} has registered since this proxy started; there is {others}")
            raise UnknownModel(f"no engine serves {name}; there is {others}", param="model")
        return asked
    if len(served) > 1:
        raise InvalidRequest(f"name one of the models {', '.join(served)}", param="model")
    return served[0]


def check_ask(ask: Ask, bounds: Bounds) -> None:
    """Everything that can be said without the model.

    Raises:
        EmptyPrompt: no text, no message, no token.
        InvalidRequest: a value out of its range; `metadata["param"]` names it.
    """
    if len(ask.request_id) > MAX_REQUEST_ID or not ask.request_id.isprintable():
        raise _bad("request_id", f"at most {MAX_REQUEST_ID} printable characters")
    if ask.timeout is not None and not ask.timeout > 0:
        raise _bad("timeout", "above 0 seconds")
    _check_prompt(ask)
    _check_sampling(ask.sampling, bounds)


def check_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Ids that a client gave, against the vocabulary (0: its size is not known).

    Raises:
        InvalidRequest: an id outside of it.
    """
    most = max(ids, default=0)
    if min(ids, default=0) < 0 or most >= (vocab_size or _UINT32):
        raise _bad("prompt", f"token ids from 0 to {(vocab_size or _UINT32) - 1}, not {most}")


def fit(choices: Sequence[Choice], prompt: int, sampling: Sampling) -> Sampling:
    """The sampling with `max_tokens` filled in, for the first choice of engines that can hold prompt
    and answer when empty.

    Raises:
        ContextExceeded: longer than the model's context, on all of them.
        PoolExceeded: more tokens than the KV pool of one side has, on all of them.
    """
    error: InvalidRequest | None = None
    for choice in choices:
        try:
            return _fit_one(choice, prompt, sampling)
        except InvalidRequest as refused:
            error = error or refused
    assert error is not None, "the caller has at least one choice"
    raise error


def _fit_one(choice: Choice, prompt: int, sampling: Sampling) -> Sampling:
    decode, prefill = choice.decode, choice.prefill
    answer = sampling.max_tokens
    if answer is None:
        answer = max(room(decode) - prompt, sampling.min_tokens, 1)
    # Prefill computes the prompt and one token, whatever the answer's length.
    needs = [("decode", decode, prompt + answer)] + ([("prefill", prefill, prompt + 1)] if prefill else [])
    for _, card, needed in needs:
        if needed > card.max_model_len:
            raise ContextExceeded(
                f"{prompt} prompt tokens and {needed - prompt} more do not fit the context of {card.max_model_len}",
                param="max_tokens" if prompt < card.max_model_len else "prompt",
                prompt_tokens=str(prompt),
                max_model_len=str(card.max_model_len),
            )
    for side, card, needed in needs:
        held = prompt if card is prefill else needed
        if held > card.total_kv_tokens:
            raise PoolExceeded(
                f"{held} tokens do not fit the {side} engine's KV pool of {card.total_kv_tokens}",
                param="prompt",
                prompt_tokens=str(prompt),
                pool_tokens=str(card.total_kv_tokens),
                side=side,
            )
    return dataclasses.replace(sampling, max_tokens=answer)


def _check_prompt(ask: Ask) -> None:
    prompt = ask.prompt
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPrompt("the prompt is empty", param="prompt")
    elif isinstance(prompt, TokenIds):
        if not prompt.ids:
            raise EmptyPrompt("the prompt has no token", param="prompt")
    elif isinstance(prompt, Chat):
        if not prompt.turns:
            raise EmptyPrompt("there is no message", param="messages")
        for index, turn in enumerate(prompt.turns):
            if not turn.role:
                raise _bad(f"messages[{index}].role", "not empty")


def _check_sampling(sampling: Sampling, bounds: Bounds) -> None:
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens < _UINT32:
        raise _bad("max_tokens", f"from 1 to {_UINT32 - 1}", sampling.max_tokens)
    if not 0 <= sampling.min_tokens < _UINT32:
        raise _bad("min_tokens", f"from 0 to {_UINT32 - 1}", sampling.min_tokens)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise _bad("min_tokens", f"at most max_tokens ({sampling.max_tokens})", sampling.min_tokens)
    _within("temperature", sampling.temperature, 0.0, 2.0)
    _within("top_p", sampling.top_p, 0.0, 1.0, above=True)
    if sampling.top_k is not None and not 0 <= sampling.top_k < _UINT32:
        raise _bad("top_k", f"from 0 to {_UINT32 - 1}", sampling.top_k)
    _within("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, above=True)
    if sampling.seed is not None and not -_INT64 <= sampling.seed < _INT64:
        raise _bad("seed", "a 64-bit integer", sampling.seed)
    if not 1 <= sampling.n <= bounds.max_n:
        raise _bad("n", f"from 1 to {bounds.max_n}", sampling.n)
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= bounds.max_logprobs:
        raise _bad("logprobs", f"from 0 to {bounds.max_logprobs}", sampling.logprobs)
    if len(sampling.stop) > bounds.max_stop:
        raise _bad("stop", f"at most {bounds.max_stop} strings", len(sampling.stop))
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in sampling.stop):
        raise _bad("stop", f"strings of 1 to {MAX_STOP_CHARS} characters")
    if len(sampling.stop_token_ids) > bounds.max_stop:
        raise _bad("stop_token_ids", f"at most {bounds.max_stop} ids", len(sampling.stop_token_ids))
    if not all(0 <= token < _UINT32 for token in sampling.stop_token_ids):
        raise _bad("stop_token_ids", "ids of tokens")


def _within(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    """Not a number and the infinities are out of every range."""
    if value is None:
        return
    if not (math.isfinite(value) and low <= value <= high and not (above and value == low)):
        bound = f"above {low:g}" if above else f"at least {low:g}"
        raise _bad(name, bound + (f" and at most {high:g}" if math.isfinite(high) else ""), value)


def _bad(param: str, wanted: str, got: float | None = None) -> InvalidRequest:
    said = f"{param} must be {wanted}" if got is None else f"{param} must be {wanted}, not {_shown(got)}"
    return InvalidRequest(said, param=param)


def _shown(number: float) -> str:
    """As it was given, if it is short."""
    if isinstance(number, float):
        return f"{number:g}"
    return str(number) if abs(number) < _INT64 << 1 else "a number of more than 64 bits"
