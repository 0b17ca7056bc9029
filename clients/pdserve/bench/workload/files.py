"""Workloads out of files, as JSON lines: ShareGPT-style data sets and recorded traces. A fault has its line."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.bench.workload.asks import Ask
from pdserve.bench.workload.lengths import Span
from pdserve.bench.workload.prompts import TRACE_BLOCK
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

CountTokens = Callable[[str], int]

_PEOPLE = ("human", "user")
_TIMES = {"time": 1.0, "timestamp": 1e-3}
"""Names of a request's time in a trace, and seconds of their unit; `timestamp` is that of the Mooncake traces."""
_PROMPTS = ("prompt_tokens", "input_length")
_OUTPUTS = ("output_tokens", "output_length")


def read_trace(path: Path) -> tuple[list[float], list[Ask]]:
    """A recorded trace: send times in seconds, the first at 0, and the requests.

    One JSON object a line: `time` (s) or `timestamp` (ms), `prompt_tokens` or `input_length`, `output_tokens` or
    `output_length`, and optionally `hash_ids`, a name for each 512 tokens of the prompt: equal names share content.
    Other members are not looked at.

    Raises:
        ConfigError: it cannot be read, is empty, or a line is not so.
    """
    times: list[float] = []
    asks: list[Ask] = []
    for where, line in _objects(path):
        name = _one_of(where, line, tuple(_TIMES))
        value = line[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {name} is {value!r}: not a time")
        seconds = value * _TIMES[name]
        if times and seconds < times[-1]:
            raise ConfigError(f"{where}: {name} is {value!r}, before the line above: a trace ascends")
        prompt = _tokens(where, line, _PROMPTS)
        times.append(seconds)
        asks.append(Ask(len(asks), prompt, _tokens(where, line, _OUTPUTS), blocks=_blocks(where, line, prompt)))
    return [time - times[0] for time in times], asks


def read_dataset(
    path: Path, count: int | None, output: Span | None, count_tokens: CountTokens | None, rng: "np.random.Generator"
) -> list[Ask]:
    """`count` requests out of a data set, in an order that `rng` draws; None: all there are.

    One JSON object a line, or one array of them. A prompt is `prompt`, or the first turn of a ShareGPT
    `conversations` if that is a person's. Its answer is as long as `output` says, else as `output_tokens`, else
    as the tokens of the second turn, which `count_tokens` counts. Conversations without a person's turn and an
    answer are passed over.

    Raises:
        ConfigError: it cannot be read, has too few usable lines, a line is none of these, or nothing says how long
            an answer is.
    """
    found: list[tuple[str, int | None, str]] = []
    for where, line in _objects(path):
        pair = _prompt_and_answer(where, line)
        if pair is None:
            continue
        told = _tokens(where, line, _OUTPUTS) if any(name in line for name in _OUTPUTS) else None
        if output is None and told is None and not (count_tokens and pair[1]):
            raise ConfigError(
                f"{where}: nothing says how long the answer is: give --output-len, or a --tokenizer that counts "
                "the recorded answers, or output_tokens in the file"
            )
        found.append((pair[0], told, pair[1]))
    if len(found) < (count or 1):
        raise ConfigError(f"{path} has {len(found)} usable prompts, {count or 1} were asked for")
    asks = []
    for index, place in enumerate(rng.permutation(len(found))[: count or len(found)].tolist()):
        text, told, answer = found[place]
        length = told
        if output is not None:
            length = int(rng.integers(output.low, output.high + 1))
        elif length is None and count_tokens is not None:
            length = max(count_tokens(answer), 1)
        asks.append(Ask(index, count_tokens(text) if count_tokens else None, length or 1, text=text))
    return asks


def _prompt_and_answer(where: str, line: Mapping[str, Any]) -> tuple[str, str] | None:
    """Prompt and recorded answer, "" where there is none; None: a conversation that is of no use."""
    if "prompt" in line:
        if not isinstance(line["prompt"], str) or not line["prompt"]:
            raise ConfigError(f"{where}: prompt is {line['prompt']!r}: not a text")
        return line["prompt"], ""
    turns = line.get("conversations", line.get("conversation"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{where}: neither a prompt nor conversations")
    if len(turns) < 2 or turns[0].get("from") not in _PEOPLE:
        return None
    first, second = (turn.get("value") for turn in turns[:2])
    return (first, second) if isinstance(first, str) and isinstance(second, str) and first and second else None


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object with its place in words."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if text.lstrip().startswith("["):
        rows = [(f"{path}, entry {number}", row) for number, row in enumerate(_parse(str(path), text), 1)]
    else:
        lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(where, _parse(where, line)) for where, line in lines]
    if not rows:
        raise ConfigError(f"{path} is empty")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: not a JSON object")
        yield where, row


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error


def _one_of(where: str, line: Mapping[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if name in line:
            return name
    raise ConfigError(f"{where}: no {' and no '.join(names)}")


def _tokens(where: str, line: Mapping[str, Any], names: tuple[str, ...]) -> int:
    name = _one_of(where, line, names)
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name} is {value!r}: not a number of tokens, at least 1")
    return value


def _blocks(where: str, line: Mapping[str, Any], prompt: int) -> tuple[int, ...]:
    blocks = line.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise ConfigError(f"{where}: hash_ids is not a list of numbers from 0 up")
    if blocks and len(blocks) != math.ceil(prompt / TRACE_BLOCK):
        raise ConfigError(
            f"{where}: {len(blocks)} hash_ids for a prompt of {prompt} tokens, one for each {TRACE_BLOCK}"
        )
    return tuple(blocks)
