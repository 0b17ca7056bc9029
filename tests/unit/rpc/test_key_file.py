"""The file of a cluster's key: who may open it, and what is said where more may than its owner."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from pdserve.rpc import key_file
from pdserve.rpc.errors import ConfigError

SECRET = b"a key that is long enough"
OPEN = [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o444, 0o440]


def with_mode(folder: Path, mode: int) -> Path:
    path = folder / "cluster's key"
    path.write_bytes(SECRET)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    """And nothing is said of it."""
    path = with_mode(tmp_path, mode)
    assert key_file.read_key_file(path) == SECRET
    assert key_file.exposed(path) == ""


@pytest.mark.parametrize("mode", OPEN, ids=oct)
def test_a_file_of_ours_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    """Any bit of group or others will do. The refusal names file and mode, and its command mends it."""
    path = with_mode(tmp_path, mode)
    with pytest.raises(ConfigError) as refused:
        key_file.read_key_file(path)
    before, _, command = refused.value.message.rpartition(": ")
    assert str(path) in before
    assert f"mode {mode:04o}" in before
    assert shlex.split(command)[0] == "chmod"
    subprocess.run(shlex.split(command), check=True)
    assert key_file.read_key_file(path) == SECRET


def test_what_cannot_be_mended_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that an orchestrator mounts is often root's and 0444, or on a file system that is read-only: refused it
    would be of no use, and no command of ours helps."""
    path = with_mode(tmp_path, 0o444)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert key_file.read_key_file(path) == SECRET
    assert "mode 0444" in key_file.exposed(path)
    monkeypatch.undo()
    flags = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda file: flags)
    assert key_file.read_key_file(path) == SECRET
    assert "mode 0444" in key_file.exposed(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By name, by both."""
    for ask in (key_file.read_key_file, key_file.exposed):
        with pytest.raises(ConfigError, match="nowhere: No such file"):
            ask(tmp_path / "nowhere")
