"""The time of one step, as a sum of straight lines.

    only prompts         prefill_base + prefill_per_token * prefill_tokens
    only decoding        decode_base  + decode_per_seq * decode_seqs + decode_per_context_token * context_tokens
    both in one step     the decode line + mixed_base + mixed_per_token * prefill_tokens
    nothing              0

Where the lines come from: fits to the per-request data of the MORI-IO connector post (published
figures for 8 req/s) give 0.08 s + 0.04 ms a token for a step of prompts alone, and decode +
0.03 s + 0.045 ms a token for a step that carries both; the MoAI report gives 69 ms + 0.16 ms a
sequence for decoding. Neither source shows a dependence on context length: its slope is 0 there.
"""

import math
from dataclasses import dataclass, fields
from typing import Final

from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds, and seconds per unit; none below 0."""

    prefill_base: float = 0.08
    """Of a step that only computes prompts."""
    prefill_per_token: float = 0.04e-3
    """Per prompt token of such a step."""
    decode_base: float = 69e-3
    """Of a step that decodes."""
    decode_per_seq: float = 0.16e-3
    """Per decoding sequence."""
    decode_per_context_token: float = 0.0
    """Per token of context, summed over the decoding sequences."""
    mixed_base: float = 0.03
    """Added to a decoding step that also computes prompts."""
    mixed_per_token: float = 0.045e-3
    """Added per prompt token of such a step."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a cost that is negative or not a number."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"cost model: {field.name} must be 0 or more, not {value!r}")

    def step_time(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float:
        """Seconds of a step with `prefill_tokens` prompt tokens and `decode_seqs` decoding
        sequences that have `context_tokens` tokens of context in all.

        Raises:
            ValueError: a count below 0.
        """
        if min(prefill_tokens, decode_seqs, context_tokens) < 0:
            raise ValueError("counts of a step cannot be below 0")
        if not decode_seqs:
            return self.prefill_base + self.prefill_per_token * prefill_tokens if prefill_tokens else 0.0
        seconds = self.decode_base + self.decode_per_seq * decode_seqs + self.decode_per_context_token * context_tokens
        if prefill_tokens:
            seconds += self.mixed_base + self.mixed_per_token * prefill_tokens
        return seconds

    def decode_times(self, decode_seqs: int, context_tokens: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps in a row: every sequence's context grows by one token a step.

        Each is to the last bit what `step_time` says, so that a caller may take steps one by one or together.

        Raises:
            ValueError: no sequence, or a count below 0.
        """
        if decode_seqs < 1 or min(context_tokens, steps) < 0:
            raise ValueError("a run of decode steps has sequences, and no count below 0")
        flat = self.decode_base + self.decode_per_seq * decode_seqs
        slope = self.decode_per_context_token
        if not slope:
            return [flat] * steps
        return [flat + slope * (context_tokens + decode_seqs * i) for i in range(steps)]


PUBLISHED: Final = CostModel()
"""The constants of the published figures; see the module."""

INSTANT: Final = CostModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Steps take no time."""
