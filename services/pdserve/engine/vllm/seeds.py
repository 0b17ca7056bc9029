"""Seeded requests on CPU, where vLLM cannot take a draw back.

A prompt that is computed in chunks samples a token after each and keeps the last chunk's only. vLLM steps the
request's generator back after the others, by an offset that only an accelerator's generators have: on CPU (0.32) one
seeded prompt longer than a chunk ends the whole engine. Here a token that will be dropped is not drawn from the
request's generator at all.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def spared(generators: dict[int, Any], dropped: Sequence[bool]) -> Iterator[None]:
    """Takes the generators of rows that will be dropped out of `generators` for a while."""
    kept = {row: generators.pop(row) for row in tuple(generators) if dropped[row]}
    try:
        yield
    finally:
        generators.update(kept)


def install(runner: Any = None) -> None:
    """Makes vLLM's CPU runner (or `runner`, a class like it) sample so; before it forks its core. Safe twice."""
    if runner is None:
        from vllm.v1.worker import cpu_model_runner

        runner = cpu_model_runner.CPUModelRunner
    sample = runner.sample_tokens
    if getattr(sample, "spares", False):
        return

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **named: Any) -> Any:
        with spared(self.input_batch.generators, self.discard_request_mask.np):
            return sample(self, *args, **named)

    sample_tokens.spares = True  # type: ignore[attr-defined]  # a mark on the function
    runner.sample_tokens = sample_tokens
