"""Traces outlive what they are of; what is fake: nothing, but that the traces are made up."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli import deployment, kept
from pdserve.cli.__main__ import main
from pdserve.cli.plan import TRACES_FILE
from pdserve.rpc.errors import DeadlinePassed, Unavailable
from pdserve.traces import otlp
from pdserve.traces.writing import Writer
from tests.unit.cli.fakes import WAIT, alive, until
from tests.unit.traces import made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The default state folder; copies of stores go to a folder that is empty in the end."""
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(copies))
    yield deployment.default_dir()
    assert not list(copies.iterdir())


def store(file: Path, *traces: made.Made, at: float = 1_700_000_000.0) -> Path:
    """A store that has ended, last written at that time."""
    file.parent.mkdir(exist_ok=True)
    writer = Writer(file, 8 << 20, 9e9)
    writer.add(otlp.decode(made.export(*traces)).spans, made.START)
    writer.close()
    os.utime(file, (at, at))
    return file


def test_what_was_stopped_can_still_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest of the deployment's file and the demo's, with one line that says of when it is; by --last, as a list
    and by id. The file stays as it was, so that reading it again says the same."""
    store(folder / TRACES_FILE, made.request(1), at=1_700_000_000.0)
    newer = store(folder / kept.DEMO_FILE, made.request(2), made.failed(3, made.START - 1), at=1_700_000_060.0)
    said = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_060))
    for words, shows in ((["--last"], "cmpl-2"), (["--last", "9"], "cmpl-3"), (["cmpl-3"], "cmpl-3")):
        assert main(["trace", *words]) == 0
        captured = capsys.readouterr()
        assert shows in captured.out
        assert captured.err == f"no deployment runs: these are the traces of what ran until {said}\n"
    assert newer.stat().st_mtime == 1_700_000_060
    assert main(["trace", "cmpl-1"]) == 1
    assert "no request 'cmpl-1'" in capsys.readouterr().err
    os.utime(folder / TRACES_FILE, (1_700_000_099, 1_700_000_099))
    assert main(["trace", "cmpl-1"]) == 0


def test_a_state_folder_has_its_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is named is read, and not the default folder's; where nothing was kept, that is said as before."""
    store(folder / kept.DEMO_FILE, made.request(2))
    other = tmp_path / "other"
    store(other / TRACES_FILE, made.request(1))
    assert main(["trace", "--last", "--state-dir", str(other)]) == 0
    assert "cmpl-1" in capsys.readouterr().out
    assert main(["trace", "--last", "--state-dir", str(tmp_path / "none")]) == 1
    assert "no deployment runs in" in capsys.readouterr().err


def test_a_deployment_gets_its_file_meanwhile(folder: Path) -> None:
    """A store claims its file, so a copy is read: `pdserve up` may start at any moment."""
    file = store(folder / TRACES_FILE, made.request(1))
    with kept.served(file), kept.served(file):
        assert not file.with_name(f"{file.name}.lock").exists()


def test_a_demo_leaves_its_traces(folder: Path, tmp_path: Path) -> None:
    """Beside a deployment's file, in place of an earlier demo's, with the log of a store that was killed; without a
    store nothing changes."""
    store(folder / TRACES_FILE, made.request(1))
    store(folder / kept.DEMO_FILE, made.request(2))
    (folder / f"{kept.DEMO_FILE}-wal").write_bytes(b"of the earlier one")
    kept.keep(tmp_path / "none")
    assert (folder / f"{kept.DEMO_FILE}-wal").exists()
    mine = store(tmp_path / "demo" / TRACES_FILE, made.request(3), at=1_800_000_000.0)
    kept.keep(mine)
    assert not mine.exists()
    assert not (folder / f"{kept.DEMO_FILE}-wal").exists()
    found = kept.newest(None)
    assert found == kept.Kept(folder / kept.DEMO_FILE, 1_800_000_000.0)
    log = store(tmp_path / "demo" / TRACES_FILE, made.request(4))
    log.with_name(f"{log.name}-wal").write_bytes(b"")
    kept.keep(log)
    assert (folder / f"{kept.DEMO_FILE}-wal").exists()


def test_what_cannot_be_read_is_said(folder: Path) -> None:
    """Another program's file, and a store that is not ready in time; nothing stays behind."""
    folder.mkdir(exist_ok=True)
    (folder / TRACES_FILE).write_bytes(b"no database at all" * 99)
    with pytest.raises(Unavailable, match="cannot be read"), kept.served(folder / TRACES_FILE):
        pass
    store(folder / kept.DEMO_FILE, made.request(1))
    with pytest.raises(DeadlinePassed, match="within 1e-06 s"), kept.served(folder / kept.DEMO_FILE, 1e-6):
        pass


READER = """
import sys, time
from pathlib import Path
from pdserve.cli import kept
with kept.served(Path(sys.argv[1])):
    print("serves", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_however_it_ends(folder: Path, how: signal.Signals) -> None:
    """Neither the store nor its copy, also when the reader is killed."""
    file = store(folder / TRACES_FILE, made.request(1))
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "serves\n"
        children = [int(pid) for pid in Path(f"/proc/{reader.pid}/task/{reader.pid}/children").read_text().split()]
        assert len(children) == 2
        reader.send_signal(how)
        reader.wait(WAIT)
    asyncio.run(until(lambda: not any(alive(pid) for pid in children)))
    copies = Path(tempfile.gettempdir())
    asyncio.run(until(lambda: not list(copies.iterdir())))
