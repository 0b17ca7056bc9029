"""What a token's KV and the next token are: functions of the tokens so far. Pure.

    raw(p)   = raw(p - 1) * K + token(p) + 1          the prefix up to position p, as one word
    KV       = mix(mix(raw(p) ^ salt(layer, head)) + word * GOLDEN)
    token    = a printable character from mix(raw(last position) ^ seed)

All arithmetic is modulo 2^64. K is odd, so powers have inverses and raw of a whole prompt is one
cumulative sum: raw(p) = K^p * sum over i <= p of (token(i) + 1) * K^-i.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_K = 0x9E3779B97F4A7C15 | 1
_K_INVERSE = pow(_K, -1, 1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15
_TOKEN_SALT = 0xD1B54A32D192ED03
_FIRST_CHARACTER = 32
_CHARACTERS = 95


def mix(value: int) -> int:
    """splitmix64's finaliser of one word."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def _powers(base: int, count: int) -> Words:
    powers = np.empty(count, dtype=np.uint64)
    value = 1
    for index in range(count):
        powers[index] = value
        value = value * base & _MASK
    powers.flags.writeable = False
    return powers


def prefixes(tokens: Sequence[int]) -> Words:
    """raw(p) of every position of `tokens`."""
    count = len(tokens)
    table = 1 << max(10, (count - 1).bit_length())
    values = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
    sums = np.cumsum(values * _powers(_K_INVERSE, table)[:count], dtype=np.uint64)
    return np.asarray(sums * _powers(_K, table)[:count], dtype=np.uint64)


def extend(raw: int, token: int) -> int:
    """raw of the next position, where `token` is."""
    return (raw * _K + token + 1) & _MASK


@lru_cache(maxsize=4096)
def _salt(layer: int, head: int) -> int:
    return mix((layer + 1) * 0x100000001B3 + head)


def kv(raws: Words, layer: int, head: int, words: int) -> Words:
    """The KV of tokens with these prefixes in one head of the model: shape (tokens, words)."""
    seeds = _mix(raws ^ np.uint64(_salt(layer, head)))
    steps = (np.arange(words, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return _mix(seeds[:, None] + steps[None, :])


def next_token(raw: int, seed: int) -> int:
    """The id (a printable ASCII byte) that follows; `seed` is 0 for greedy."""
    return _FIRST_CHARACTER + mix(raw ^ _TOKEN_SALT ^ mix(seed & _MASK)) % _CHARACTERS


def ends_here(raw: int, every: int) -> bool:
    """Whether the model would end its answer here: one position in `every`; 0: never."""
    return every > 0 and mix(raw + 0x5851F42D4C957F2D & _MASK) % every == 0


def runner_up(token: int, place: int) -> int:
    """The candidate `place` (from 1) behind `token`."""
    return _FIRST_CHARACTER + (token - _FIRST_CHARACTER + place) % _CHARACTERS


def confidence(raw: int) -> float:
    """The made-up probability of the chosen token, in [0.5, 0.9)."""
    return 0.5 + 0.4 * (mix(raw ^ 0xA0761D6478BD642F) % 1000) / 1000
