"""The port's words to vLLM's and back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdserve.engine.port import Candidate, EngineTimes, Finish, Position, Sampling

ABORTED = "abort"
"""vLLM's reason for a request that was ended from outside."""
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


def sampling_params(sampling: Sampling, defaults: Mapping[str, Any], extra: Mapping[str, Any] | None) -> Any:
    """vLLM's SamplingParams, streaming what is new in each output.

    `defaults`: the model's own, for what the request leaves open; `extra`: for the connector.

    Raises:
        ValueError: what vLLM refuses (its own error classes).
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    chosen = {
        name: value
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
        if (value := getattr(sampling, name)) is not None
    }
    # vLLM's own default of 16 tokens is nobody's; None is as many as the context has room for.
    tokens = {"max_tokens": sampling.max_tokens or defaults.get("max_tokens")}
    return SamplingParams(
        **{**defaults, **chosen, **tokens},
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": dict(extra)} if extra is not None else None,
    )


def finish(reason: str | None) -> Finish | None:
    """None while the answer goes on.

    Raises:
        KeyError: vLLM gave the request up (abort, error).
    """
    return None if reason is None else _FINISHES[reason]


def stop_reason(reason: int | str | None) -> str:
    """The stop string, or the stop token's id in digits."""
    return "" if reason is None else str(reason)


def positions(token_ids: Sequence[int], logprobs: Iterable[Mapping[int, Any]] | None, top: int) -> tuple[Position, ...]:
    """Log probabilities of each new token; `top`: how many were asked for."""
    if logprobs is None:
        return ()
    return tuple(_position(token, entries, top) for token, entries in zip(token_ids, logprobs, strict=True))


def times(metrics: Any, last_chunk_ns: int = 0) -> EngineTimes:
    """vLLM's stamps, which are seconds of CLOCK_MONOTONIC in EngineCore, and the connector's."""
    if metrics is None:
        return EngineTimes(last_chunk_ns=last_chunk_ns)
    return EngineTimes(int(metrics.scheduled_ts * 1e9), int(metrics.first_token_ts * 1e9), last_chunk_ns)


def _position(token: int, entries: Mapping[int, Any], top: int) -> Position:
    candidates = {
        id_: Candidate(id_, entry.decoded_token or "", float(entry.logprob)) for id_, entry in entries.items()
    }
    best = sorted(candidates.values(), key=lambda candidate: -candidate.logprob)
    return Position(candidates[token], tuple(best[:top]))
