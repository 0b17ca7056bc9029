"""The traces of deployments that have ended: where their files lie, and a trace store that reads one for a moment."""

import contextlib
import json
import os
import select
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli import deployment, extras
from pdserve.cli.plan import TRACES_FILE
from pdserve.rpc.errors import DeadlinePassed, Unavailable

DEMO_FILE = "demo-traces.sqlite"
"""Of the last demo, in the default state folder: a name of its own, so that a deployment's file is not touched."""
START_S = 30.0
"""Longest start of the store on a busy machine."""
_SHORT = 4096
_NEVER = ("--max-bytes", str(1 << 50), "--max-age", "9e9")
"""It reads: nothing is taken out of what was kept."""
_GUARD = """
trap '' INT TERM HUP
read -r group
cat >/dev/null
[ -z "$group" ] || kill -s KILL -- "-$group" 2>/dev/null
rm -rf -- "$0"
"""
"""Ends the store and removes its folder where this process vanishes without doing so: the pipe's end means that."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The traces of what does not run any more."""

    file: Path
    until: float
    """Seconds since the epoch at which something was last written."""


def keep(file: Path) -> None:
    """Moves a demo's store to where `newest` finds it; nothing where there is none.

    Raises:
        ConfigError: the default state folder is somebody else's.
        OSError: it cannot be moved.
    """
    if not file.exists():
        return
    folder = deployment.default_dir()
    deployment.make_private(folder)
    for end in ("", "-wal", "-shm"):
        (folder / f"{DEMO_FILE}{end}").unlink(missing_ok=True)
    # A log is left only by a store that was killed: without it the last traces would be missing.
    for end in ("-wal", ""):
        draft = folder / f".{DEMO_FILE}{end}"
        with contextlib.suppress(FileNotFoundError):
            shutil.move(file.with_name(file.name + end), draft)  # maybe onto another disk
            draft.replace(folder / f"{DEMO_FILE}{end}")


def newest(state_dir: Path | None) -> Kept | None:
    """The newest file of what ran in a folder; in the default one the demo's too. None: there is none."""
    folder = state_dir or deployment.default_dir()
    names = (TRACES_FILE,) if state_dir else (TRACES_FILE, DEMO_FILE)
    found = [Kept(folder / name, until) for name in names if (until := _written(folder / name)) is not None]
    return max(found, key=lambda kept: kept.until, default=None)


@contextlib.contextmanager
def served(file: Path, start_timeout: float = START_S) -> Iterator[str]:
    """A trace store on a copy of that file, on free ports, that runs until exit; gives its base URL.

    A copy, because a store claims its file: a deployment that starts meanwhile must get it.

    Raises:
        ConfigError: the store is not installed.
        Unavailable: the file cannot be read, or the store does not start; the message has what it said.
        DeadlinePassed: it is not ready within `start_timeout` seconds.
    """
    extras.check("trace", "node", extras.NODE)
    folder = Path(tempfile.mkdtemp(prefix="pdserve-trace-"))
    flags = ("--otlp-port", "0", "--port", "0", "--file", str(folder / TRACES_FILE), *_NEVER, "--log-format", "json")
    # Both in sessions of their own: Ctrl-C is ours, and we end them.
    with subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, str(folder)], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
    ) as guard:
        assert guard.stdin is not None  # it was asked for
        try:
            _copy(file, folder / TRACES_FILE)
            with subprocess.Popen(
                [sys.executable, "-m", "pdserve.traces", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as store:
                try:
                    guard.stdin.write(f"{store.pid}\n".encode())
                    yield _ready(store, start_timeout)
                finally:
                    store.kill()  # it has but a copy
        finally:
            guard.kill()
            shutil.rmtree(folder)


def _copy(file: Path, to: Path) -> None:
    """What is in a store, its log included, as it is at one moment."""
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as source,
            contextlib.closing(sqlite3.connect(to)) as copy,
        ):
            source.backup(copy)
    except sqlite3.Error as error:
        raise Unavailable(f"the traces in {file} cannot be read: {error}") from error


def _written(file: Path) -> float | None:
    """When a store was last written, its log included; None: it is not there."""
    try:
        until = file.stat().st_mtime
    except OSError:
        return None
    with contextlib.suppress(OSError):
        until = max(until, file.with_name(f"{file.name}-wal").stat().st_mtime)
    return until


def _ready(store: "subprocess.Popen[bytes]", timeout: float) -> str:
    """The address that it says once it serves."""
    assert store.stderr is not None  # it was asked for
    until, said = time.monotonic() + timeout, b""
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([store.stderr], [], [], left)[0]:
            raise DeadlinePassed(f"the trace store of what was kept is not ready within {timeout:g} s")
        piece = os.read(store.stderr.fileno(), _SHORT)
        said += piece
        for line in said.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["event"] == "traces_ready":
                    return str(event["http"])
        if not piece:
            words = said.decode(errors="replace").strip()
            raise Unavailable(f"the traces that were kept cannot be read:\n{words}")
