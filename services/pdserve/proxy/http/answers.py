"""Response bodies of the OpenAI face: one class per kind of answer, whole and in chunks. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.proxy.types import Candidate, Delta, Finish, Finished, Position, TransferFacts

_FINISH: Mapping[Finish | None, str | None] = {Finish.STOP: "stop", Finish.LENGTH: "length", None: None}
_encode = msgspec.json.Encoder().encode

Json = dict[str, Any]


class Completion:
    """text_completion."""

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}  # characters of each answer so far, for `text_offset`

    def choice(self, index: int, text: str, positions: tuple[Position, ...], finish: str | None, stop: str) -> Json:
        """A choice of a whole answer."""
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, positions) if positions else None,
            "finish_reason": finish,
            "stop_reason": stop or None,
        }

    def chunk_choice(self, delta: Delta) -> Json:
        """A choice of one chunk."""
        return self.choice(delta.index, delta.text, delta.logprobs, _FINISH[delta.finish], delta.stop_reason)

    def _logprobs(self, index: int, positions: tuple[Position, ...]) -> Json:
        at = self._offsets.get(index, 0)
        offsets: list[int] = []
        for position in positions:
            offsets.append(at)
            at += len(position.sampled.token)
        self._offsets[index] = at
        return {
            "tokens": [p.sampled.token for p in positions],
            "token_logprobs": [p.sampled.logprob for p in positions],
            "top_logprobs": [
                {**{c.token: c.logprob for c in p.top}, p.sampled.token: p.sampled.logprob} for p in positions
            ],
            "text_offset": offsets,
        }


class ChatCompletion:
    """chat.completion and chat.completion.chunk."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def choice(self, index: int, text: str, positions: tuple[Position, ...], finish: str | None, stop: str) -> Json:
        """A choice of a whole answer."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(positions) if positions else None,
            "finish_reason": finish,
            "stop_reason": stop or None,
        }

    def chunk_choice(self, delta: Delta) -> Json:
        """A choice of one chunk; each answer's first names the role."""
        said: Json = {"content": delta.text}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            said = {"role": "assistant", "content": delta.text}
        return {
            "index": delta.index,
            "delta": said,
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": _FINISH[delta.finish],
            "stop_reason": delta.stop_reason or None,
        }

    def _logprobs(self, positions: tuple[Position, ...]) -> Json:
        content = [{**_candidate(p.sampled), "top_logprobs": [_candidate(c) for c in p.top]} for p in positions]
        return {"content": content, "refusal": None}


Shape = Completion | ChatCompletion


class Answer:
    """Collects or streams one answer. Stream: `chunk` each delta, then `last` or `usage_chunk`."""

    def __init__(self, shape: Shape, request_id: str, trace_id: str, model: str, created: int) -> None:
        self._shape = shape
        self._request_id = request_id
        self._trace_id = trace_id
        self._head: Json = {"id": shape.id_prefix + request_id, "object": "", "created": created, "model": model}
        self._texts: dict[int, list[Delta]] = {}

    def chunk(self, delta: Delta, *, usage_follows: bool) -> Json:
        """One chunk of a stream."""
        said = {**self._head, "object": self._shape.chunk_name, "choices": [self._shape.chunk_choice(delta)]}
        if usage_follows:
            said["usage"] = None
        return said

    def last_chunk(self, chunk: Json, done: Finished) -> Json:
        """The chunk that ends an answer, with what is known only now."""
        return {**chunk, "pdserve": self._facts(done)}

    def usage_chunk(self, done: Finished) -> Json:
        """The extra chunk of `include_usage`: no choices."""
        head = {**self._head, "object": self._shape.chunk_name, "choices": []}
        return {**head, "usage": _usage(done), "pdserve": self._facts(done)}

    def collect(self, delta: Delta) -> None:
        """Keeps a delta for `whole`."""
        self._texts.setdefault(delta.index, []).append(delta)

    def whole(self, done: Finished) -> Json:
        """The answer in one piece."""
        choices: list[Json] = []
        for index, deltas in sorted(self._texts.items()):
            positions = tuple(position for delta in deltas for position in delta.logprobs)
            text = "".join(delta.text for delta in deltas)
            last = deltas[-1]
            choices.append(self._shape.choice(index, text, positions, _FINISH[last.finish], last.stop_reason))
        head = {**self._head, "object": self._shape.object_name, "choices": choices}
        return {**head, "usage": _usage(done), "pdserve": self._facts(done)}

    def _facts(self, done: Finished) -> Json:
        return {
            "request_id": self._request_id,
            "trace_id": self._trace_id,
            "mode": done.mode.value if done.mode else None,
            "timings": {
                "ttft_seconds": done.timings.ttft,
                "parts": done.timings.parts,
                "unattributed_seconds": done.timings.unattributed,
                "e2e_seconds": done.timings.e2e,
            },
            "transfer": _transfer(done.transfer) if done.transfer else None,
            "recomputed_tokens": done.recomputed_tokens,
            "fallbacks": done.fallbacks,
            "continuations": done.continuations,
            "prefill_engine_id": done.prefill_engine_id,
            "decode_engine_id": done.decode_engine_id,
        }


def event(body: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def _usage(done: Finished) -> Json:
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _transfer(facts: TransferFacts) -> Json:
    return {name: getattr(facts, name) for name in TransferFacts.__dataclass_fields__}


def _candidate(candidate: Candidate) -> Json:
    return {"token": candidate.token, "logprob": candidate.logprob, "bytes": list(candidate.token.encode())}
