"""Whether the demo's answers are what a split deployment promises, and the tables that show it; pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.cli import rounding, text
from pdserve.client import Completion, Timings
from pdserve.rpc.errors import ConfigError

_FLOAT32 = 4
_REST = "unattributed"


@dataclass(frozen=True, slots=True)
class Geometry:
    """How much KV cache a prompt has, known from the model and not from those who moved it."""

    block_size: int
    """Tokens per block."""
    layers: int
    layer_block_bytes: int
    """Bytes of one block of one layer on one rank."""
    ranks: int = 1

    def expected_bytes(self, prompt_tokens: int) -> int:
        """Bytes that a whole prompt takes; its last block is handed over whole."""
        blocks = math.ceil(prompt_tokens / self.block_size)
        return self.layers * blocks * self.layer_block_bytes * self.ranks


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's two answers."""

    name: str
    mode: str
    """The mode that was asked for."""
    alone: Completion
    """By the single engine."""
    split: Completion
    """By the pair."""

    @property
    def identical(self) -> bool:
        """Whether both chose the same tokens and said the same text."""
        return (self.alone.token_ids, self.alone.text) == (self.split.token_ids, self.split.text)


def geometry(config: Mapping[str, Any], block_size: int) -> Geometry:
    """From a model's config.json, for float32 and one rank.

    Raises:
        ConfigError: the model does not keep K and V of heads, so its size does not follow from the file.
    """
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
        layers = int(config["num_hidden_layers"])
    except KeyError as missing:
        raise ConfigError(f"config.json has no {missing}: the demo cannot know how large its KV cache is") from None
    if "kv_lora_rank" in config:
        raise ConfigError("the demo does not know the KV cache of a latent-attention model")
    return Geometry(block_size, layers, 2 * kv_heads * head_size * _FLOAT32 * block_size)


def faults(answer: Answer, expected: Geometry) -> list[str]:
    """What is wrong with an answer, a sentence each; empty when it keeps every promise."""
    split, alone = answer.split, answer.alone
    found = []
    if not answer.identical:
        found.append(f"the pair says {split.text!r}, the single engine {alone.text!r}")
    if not alone.token_ids:
        found.append("the single engine said nothing, so there was nothing to compare")
    if alone.prefill_engine_id or alone.transfer:
        found.append("the single engine's answer was split")
    if not split.prefill_engine_id or split.prefill_engine_id == split.decode_engine_id:
        found.append("the pair's answer was not split")
    if split.decode_engine_id == alone.decode_engine_id:
        found.append("both answers came from one engine")
    if split.mode != answer.mode:
        found.append(f"asked for {answer.mode}, got {split.mode}")
    if split.recomputed_tokens > expected.block_size:
        found.append(f"decode computed {split.recomputed_tokens} prompt tokens itself, more than one block")
    if split.fallbacks:
        found.append(f"it left its path {split.fallbacks} times")
    want = expected.expected_bytes(split.usage.prompt_tokens)
    if split.kv_bytes != want:
        found.append(f"{split.kv_bytes} bytes of KV cache were handed over, the prompt has {want}")
    return found


def answers_table(answers: Sequence[Answer]) -> str:
    """A row per answer: what it cost and what was handed over."""
    header = (
        "answer", "mode", "transport", "same",
        "TTFT ms", "alone ms", "prompt", "out", "recomputed", "fallbacks", "KV bytes", "GB/s",
    )  # fmt: skip
    rows = []
    for answer in answers:
        split = answer.split
        rows.append(
            (
                answer.name,
                str(split.mode),
                split.transport,
                "yes" if answer.identical else "NO",
                _ms(split.timings.ttft_seconds),
                text.milliseconds(answer.alone.timings.ttft_seconds),
                str(split.usage.prompt_tokens),
                str(split.usage.completion_tokens),
                str(split.recomputed_tokens),
                str(split.fallbacks),
                str(split.kv_bytes),
                f"{split.transfer.gigabytes_per_second:.2f}" if split.transfer else "-",
            )
        )
    return text.table(header, rows, left=4)


def parts_table(answers: Sequence[Answer]) -> str:
    """A row per part of TTFT that was measured, a column per answer, milliseconds; to the microsecond they sum to the
    last row."""
    names = list(dict.fromkeys(name for answer in answers for name in answer.split.timings.parts))
    header = ("part of TTFT, ms", *(f"{answer.name} {answer.mode}" for answer in answers))
    all_timings = [answer.split.timings for answer in answers]
    shares = [_shares(timings) for timings in all_timings]
    rows = [
        [name, *(rounding.milliseconds(each[name]) if name in each else "-" for each in shares)]
        for name in (*names, _REST)
    ]
    rows.append(["TTFT", *(_ms(t.ttft_seconds) for t in all_timings)])
    return text.table(header, rows)


def _shares(timings: Timings) -> dict[str, int]:
    """Microseconds by part, as `pdserve trace` has them."""
    return rounding.of_request(
        {"parts": timings.parts, "unattributed": timings.unattributed_seconds, "ttft": timings.ttft_seconds}
    )


def _ms(seconds: float) -> str:
    return rounding.milliseconds(rounding.microseconds(seconds))


def verdict(answers: Sequence[Answer]) -> str:
    """The demo's last line."""
    same = sum(answer.identical for answer in answers)
    return f"demo: {len(answers)} answers, {same} identical to the single engine"
