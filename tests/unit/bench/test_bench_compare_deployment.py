"""One deployment of a comparison, before it starts anything."""

import tempfile
from pathlib import Path

import pytest

from pdserve.bench.compare.deployment import Deployment
from pdserve.rpc.errors import ConfigError


def test_words_that_cannot_be_leave_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A configuration that lacks its budget is found when the words are made, and the state folder is there by then."""
    made: list[Path] = []
    mkdtemp = tempfile.mkdtemp

    def here(**_: object) -> str:
        made.append(Path(mkdtemp(dir=tmp_path)))
        return str(made[-1])

    def words(_: Path) -> tuple[str, ...]:
        raise ConfigError("needs a token budget")

    monkeypatch.setattr(tempfile, "mkdtemp", here)
    with pytest.raises(ConfigError, match="needs a token budget"):
        Deployment(words, 1.0, tmp_path / "logs")
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []
