"""Why a process has ended, in the headline: the sentence that its log has among much else."""

import json
from pathlib import Path

import pytest

from pdserve.cli import last_words, model
from pdserve.cli.board import Board
from pdserve.cli.fleet import Fleet
from pdserve.client import ConfigError, Unavailable
from tests.unit.cli.fakes import WAIT, fake_plan

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'


def line(event: str, **fields: str) -> str:
    return json.dumps({"event": event, "level": "error", "service": "decode", **fields})


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (line("ended", reason="CONFIG", detail="layers must be at least 1"), "layers must be at least 1"),
        (line("ended", reason="NOT_SAME_KEY", detail="wrong key"), "wrong key [NOT_SAME_KEY]"),
        (line("ended", reason="CONFIG", detail="1 error for\n  Model\n    no"), "1 error for Model no"),
        (line("cannot_start", error="port 1 is taken"), "port 1 is taken"),
        (line("proxy_died", reason="UNAVAILABLE", error="no socket"), "no socket"),
        (line("traces_died", reason="CONFIG", error="no file"), "no file"),
        ("pdserve-kvd: lease must be positive\n", "lease must be positive"),
        (
            "usage: pdserve-decode [-h]\npdserve-decode: error: unrecognized arguments: --x",
            "unrecognized arguments: --x",
        ),
        (TRACEBACK + "ModuleNotFoundError: No module named 'zmq'\n", "ModuleNotFoundError: No module named 'zmq'"),
        (TRACEBACK + "ValueError: a\n" + line("ended", reason="CONFIG", detail="b") + "\nsome library", "b"),
        (line("ended", reason="CONFIG", detail="b") + "\n" + TRACEBACK + "OSError: late", "b"),
        (TRACEBACK + "ValueError: first\n\n" + TRACEBACK + "EngineError: last", "EngineError: last"),
        (line("engine_ended", detail="of another"), ""),
        (line("ended") + '\n{"event": ["ended"]}\n{"event": \n[1]', ""),
        ("something is wrong\nsay: Error", ""),
        ("", ""),
    ],
)
def test_the_sentence_is_found(log: str, sentence: str) -> None:
    """Of every service's last event, of kvd's and argparse's line, else of a traceback; else none is made up."""
    assert last_words.of(log) == sentence


def test_a_sentence_is_no_novel() -> None:
    """The log has all of it."""
    assert last_words.of(line("ended", reason="CONFIG", detail="a " * 1000)) == "a " * 200 + "..."


async def test_the_headline_has_it(folder: Path, board: Board) -> None:
    """In the first line of the error, which is what people read."""
    said = line("ended", reason="NOT_SAME_KEY", detail="the proxy has another key")
    async with Fleet(fake_plan(folder, decode_0=("--die", "1", "--says", said)), board) as fleet:
        with pytest.raises(Unavailable) as caught:
            await fleet.start(WAIT)
    first = str(caught.value).splitlines()[0]
    assert "ended with status 1: the proxy has another key [NOT_SAME_KEY]; the end of its log" in first


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a path is one; anything else may be a name of Hugging Face's, also with a slash."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("/no/such", "./no", "../no"):
        with pytest.raises(ConfigError, match="no such folder"):
            model.resolve(name)
    assert model.resolve("org/model") == ("org/model", "org/model")
    assert model.resolve("./model") == ("./model", "model")
    assert model.resolve(str(tmp_path / "model")) == (str(tmp_path / "model"), "model")
