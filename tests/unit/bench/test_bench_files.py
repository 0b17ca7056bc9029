"""Workloads out of files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench.workload.files import read_dataset, read_trace
from pdserve.bench.workload.lengths import Span
from pdserve.rpc.errors import ConfigError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(row, ...)`: a file of JSON lines; a string goes in as it is."""

    def lines(*rows: object) -> Path:
        file = tmp_path / "workload.jsonl"
        file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return file

    return lines


def rng() -> np.random.Generator:
    """The order of a data set."""
    return np.random.default_rng(2)


def talk(question: str, answer: str, first: str = "human") -> dict[str, object]:
    """A conversation as ShareGPT has them."""
    return {"id": "x", "conversations": [{"from": first, "value": question}, {"from": "gpt", "value": answer}]}


def words(text: str) -> int:
    """Stands for a tokenizer."""
    return len(text.split())


def test_a_trace_in_seconds_and_one_in_milliseconds(write: Write) -> None:
    """Both begin at 0; the second is the Mooncake traces' form, with names of blocks."""
    times, asks = read_trace(write({"time": 5, "prompt_tokens": 10, "output_tokens": 3}, {"time": 5.5,
        "prompt_tokens": 20, "output_tokens": 4}))  # fmt: skip
    assert times == [0.0, 0.5]
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in asks] == [(10, 3), (20, 4)]
    times, asks = read_trace(
        write({"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]})
    )
    assert times == [0.0]
    assert asks[0].blocks == (46, 47)


GOOD = '{"time": 1, "prompt_tokens": 5, "output_tokens": 5}'


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"prompt_tokens": 5, "output_tokens": 5}', "line 2: no time and no timestamp"),
        ('{"time": 0.5, "prompt_tokens": 5, "output_tokens": 5}', "line 2: time is 0.5, before the line above"),
        ('{"time": "now", "prompt_tokens": 5, "output_tokens": 5}', "line 2: time is 'now'"),
        ('{"time": NaN, "prompt_tokens": 5, "output_tokens": 5}', "line 2: time is nan"),
        ('{"time": 2, "prompt_tokens": 0, "output_tokens": 5}', "line 2: prompt_tokens is 0"),
        ('{"time": 2, "prompt_tokens": 5}', "line 2: no output_tokens"),
        ('{"time": 2, "prompt_tokens": 5, "output_tokens": 2.5}', "line 2: output_tokens is 2.5"),
        ('{"time": 2, "prompt_tokens": 5, "output_tokens": 2, "hash_ids": [1, 2]}', "2 hash_ids for a prompt of 5"),
        ('{"time": 2, "prompt_tokens": 5, "output_tokens": 2, "hash_ids": "a"}', "hash_ids is not a list"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(write: Write, second: str, said: str) -> None:
    """The first line is good, the second is what the message is about."""
    with pytest.raises(ConfigError) as caught:
        read_trace(write(GOOD, second))
    assert said in caught.value.message


def test_an_empty_or_missing_trace_is_refused(write: Write, tmp_path: Path) -> None:
    """A file of blank lines is empty."""
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(write("", "  "))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_data_sets_answers_are_as_long_as_they_were(write: Write) -> None:
    """Where a tokenizer counts them; conversations that no person began are passed over."""
    file = write(talk("one two three", "a b"), talk("I answer", "x", first="gpt"), talk("four", "a b c d"))
    asks = read_dataset(file, None, None, words, rng())
    assert sorted((ask.text, ask.prompt_tokens, ask.output_tokens) for ask in asks) == [
        ("four", 1, 4), ("one two three", 3, 2),
    ]  # fmt: skip
    assert [ask.index for ask in asks] == [0, 1]


def test_a_data_set_as_one_array_and_with_lengths_of_its_own(write: Write) -> None:
    """The array is ShareGPT's own file; --output-len goes over what a file says."""
    assert len(read_dataset(write(json.dumps([talk("a", "b"), talk("c", "d")])), 2, Span(9, 9), None, rng())) == 2
    file = write({"prompt": "Hello", "output_tokens": 6})
    assert [ask.output_tokens for ask in read_dataset(file, 1, None, None, rng())] == [6]
    assert [ask.output_tokens for ask in read_dataset(file, 1, Span(9, 9), None, rng())] == [9]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (talk("a", "b"), "nothing says how long the answer is"),
        ({"prompt": "a"}, "nothing says how long the answer is"),
        ({"prompt": ""}, "prompt is ''"),
        ({"text": "a"}, "neither a prompt nor conversations"),
        (talk("a", "b", first="system"), "0 usable prompts"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(write: Write, row: object, said: str) -> None:
    """Without a tokenizer and without --output-len."""
    with pytest.raises(ConfigError, match=said):
        read_dataset(write(row), None, None, None, rng())


def test_more_requests_than_prompts_are_refused(write: Write) -> None:
    """A prompt sent twice would be found in the prefix cache."""
    with pytest.raises(ConfigError, match="1 usable prompts, 2 were asked for"):
        read_dataset(write(talk("a", "b")), 2, Span(1, 1), None, rng())
