"""The demo finds what is wrong."""

import dataclasses
from typing import Any

import pytest

from pdserve.cli import demo_check
from pdserve.cli.demo_check import Answer, Geometry
from pdserve.cli.demo_questions import QUESTIONS
from pdserve.client import Choice, Completion, Timings, Transfer, Usage
from pdserve.rpc.errors import ConfigError

SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
GEOMETRY = Geometry(block_size=32, layers=30, layer_block_bytes=49152)


def completion(**changes: Any) -> Completion:
    transfer = Transfer(2 * 30 * 49152, 2, 30, 1, "shm", 0.001, 0.002, 0)
    done = Completion(
        request_id="r",
        trace_id="t",
        model="m",
        choices=(Choice(0, "Paris.", (7, 8), "length"),),
        usage=Usage(33, 0, 2),
        timings=Timings(0.5, {"admit": 0.1, "kv.wait": 0.3}, 0.1, 2.0),
        mode="read",
        transfer=transfer,
        recomputed_tokens=1,
        fallbacks=0,
        prefill_engine_id="p",
        decode_engine_id="d",
    )
    return dataclasses.replace(done, **changes)


ALONE = completion(transfer=None, mode=None, prefill_engine_id="", decode_engine_id="b", recomputed_tokens=0)


def test_geometry_follows_from_the_config() -> None:
    """K and V, 3 heads of 64 float32 numbers, 32 tokens: 49152 bytes per block and layer; blocks are counted whole."""
    geometry = demo_check.geometry(SMOLLM2, 32)
    assert geometry == GEOMETRY
    assert geometry.expected_bytes(32) == 30 * 49152
    assert geometry.expected_bytes(33) == 2 * 30 * 49152
    assert geometry.expected_bytes(1) == 30 * 49152
    assert dataclasses.replace(geometry, ranks=2).expected_bytes(1) == 2 * 30 * 49152


def test_a_config_that_does_not_tell_is_refused() -> None:
    """Without the counts, or with latent attention, the size is unknown and the demo says so."""
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        demo_check.geometry({"num_attention_heads": 2, "hidden_size": 8}, 32)
    with pytest.raises(ConfigError, match="latent"):
        demo_check.geometry({**SMOLLM2, "kv_lora_rank": 512}, 32)


def test_an_answer_that_keeps_every_promise_has_no_fault() -> None:
    """Same tokens, one recomputed token, no fallback, all bytes: nothing to say."""
    assert demo_check.faults(Answer("short", "read", ALONE, completion()), GEOMETRY) == []


@pytest.mark.parametrize(
    ("split", "alone", "says"),
    [
        ({"choices": (Choice(0, "Paris.", (7, 9), "length"),)}, {}, "the pair says"),
        ({"choices": (Choice(0, "Lyon.", (7, 8), "length"),)}, {}, "the pair says"),
        ({"recomputed_tokens": 33}, {}, "33 prompt tokens itself"),
        ({"fallbacks": 1}, {}, "left its path 1 times"),
        ({"transfer": None}, {}, "0 bytes of KV"),
        ({"transfer": Transfer(1, 2, 30, 1, "shm", 1, 1, 0)}, {}, "1 bytes of KV"),
        ({"mode": "write"}, {}, "asked for read, got write"),
        ({"mode": None}, {}, "asked for read, got None"),
        ({"prefill_engine_id": ""}, {}, "was not split"),
        ({"prefill_engine_id": "d"}, {}, "was not split"),
        ({"decode_engine_id": "b"}, {}, "from one engine"),
        ({}, {"prefill_engine_id": "p"}, "single engine's answer was split"),
        (
            {"choices": (Choice(0, "", (), "stop"),)},
            {"choices": (Choice(0, "", (), "stop"),)},
            "nothing to compare",
        ),
    ],
)
def test_each_broken_promise_is_a_fault(split: dict[str, Any], alone: dict[str, Any], says: str) -> None:
    """Whatever one thing is broken, that one is found and named."""
    answer = Answer("short", "read", dataclasses.replace(ALONE, **alone), completion(**split))
    found = demo_check.faults(answer, GEOMETRY)
    assert len(found) == 1
    assert says in found[0]


def test_the_verdict_counts_identical_answers() -> None:
    """The last line says how many answers there were and how many are the single engine's."""
    other = completion(choices=(Choice(0, "Lyon.", (1,), "length"),))
    answers = [Answer("short", "read", ALONE, completion()), Answer("long", "read", ALONE, other)]
    assert demo_check.verdict(answers) == "demo: 2 answers, 1 identical to the single engine"


def test_the_tables_show_every_fact() -> None:
    """A row per answer with mode, tokens, recomputed, fallbacks, bytes, speed and transport; parts sum to TTFT."""
    table = demo_check.answers_table([Answer("short", "read", ALONE, completion())])
    assert table.splitlines()[-1].split() == [
        "short", "read", "shm", "yes", "500.000", "500", "33", "2", "1", "0", "2949120", "2.95",
    ]  # fmt: skip
    parts = demo_check.parts_table([Answer("short", "read", ALONE, completion())])
    rows = dict(line.rsplit(None, 1) for line in parts.splitlines()[2:])
    assert rows == {"admit": "100.000", "kv.wait": "300.000", "unattributed": "100.000", "TTFT": "500.000"}


def test_the_questions_do_not_share_blocks() -> None:
    """Three READ and three WRITE at least, a chat among them, and no two begin alike: no prefix cache can help."""
    modes = [question.mode for question in QUESTIONS]
    assert modes.count("read") >= 3
    assert modes.count("write") >= 3
    assert any(question.system for question in QUESTIONS)
    beginnings = {(question.system or question.text)[:16] for question in QUESTIONS}
    assert len(beginnings) == len(QUESTIONS)
    assert max(len(question.text) for question in QUESTIONS) > 400
