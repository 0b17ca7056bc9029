"""The file that traces lie in: its tables, its version, and the refusal of every other file.

traces     one row a trace, numbered in the order of arrival: pruning takes the lowest
spans      one row a span, what is searched as columns and the rest as JSON
origins    resources and scopes, each once
requests   one row a span that is a request
"""

import sqlite3
from pathlib import Path

from pdserve.rpc.errors import ConfigError

APPLICATION = 0x70647472
"""`pdtr`: what SQLite's header says the file is for."""
VERSION = 2
BUSY_S = 5.0
"""Longest wait for another connection's lock."""
_MAGIC = b"SQLite format 3\x00"
_TABLES = """
CREATE TABLE traces (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    trace_id TEXT NOT NULL UNIQUE,
    arrived_ns INTEGER NOT NULL,
    spans INTEGER NOT NULL
);
CREATE TABLE origins (
    id INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    instance TEXT NOT NULL,
    content TEXT NOT NULL UNIQUE
);
CREATE TABLE spans (
    trace INTEGER NOT NULL,
    span_id TEXT NOT NULL,
    parent_id TEXT NOT NULL,
    origin INTEGER NOT NULL,
    name TEXT NOT NULL,
    kind INTEGER NOT NULL,
    start_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    status INTEGER NOT NULL,
    content TEXT NOT NULL,
    PRIMARY KEY (trace, span_id)
) WITHOUT ROWID;
CREATE INDEX spans_by_start ON spans (start_ns, origin, name, kind, end_ns);
CREATE INDEX spans_by_origin ON spans (origin);
CREATE TABLE requests (
    trace INTEGER NOT NULL,
    span_id TEXT NOT NULL,
    start_ns INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    ttft REAL,
    e2e REAL,
    mode TEXT NOT NULL,
    transport TEXT NOT NULL,
    model TEXT NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,
    fallbacks INTEGER NOT NULL,
    continuations INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    kv_bytes INTEGER NOT NULL,
    parts TEXT NOT NULL,
    unattributed REAL,
    failed_after REAL,
    failed_in TEXT NOT NULL DEFAULT '',
    failed_or_later TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (trace, span_id)
) WITHOUT ROWID;
CREATE INDEX requests_by_start ON requests (start_ns);
CREATE INDEX requests_by_id ON requests (request_id);
"""
_SINCE_1 = {
    "failed_after": "REAL",
    "failed_in": "TEXT NOT NULL DEFAULT ''",
    "failed_or_later": "TEXT NOT NULL DEFAULT '[]'",
}
"""Columns of `requests` that version 1 lacks."""


def open_writer(path: Path) -> sqlite3.Connection:
    """Opens the file for writing, from any one thread, and makes it where there is none.

    Raises:
        ConfigError: it cannot be opened, is damaged, or is not a trace store of this version.
    """
    check(path)
    try:
        database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise ConfigError(f"trace store {path} cannot be opened: {error}") from error
    try:
        _prepare(database, path)
    except sqlite3.Error as error:
        database.close()
        raise ConfigError(f"trace store {path} is damaged or cannot be written: {error}; move it away") from error
    except BaseException:
        database.close()
        raise
    return database


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads what `open_writer` has opened."""
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,  # it is closed by another thread than the one that asks
    )
    database.execute("PRAGMA query_only = 1")
    return database


def check(path: Path) -> None:
    """Refuses a file that is no SQLite database; one that is not there is none.

    Raises:
        ConfigError: it is another program's, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"trace store {path}: {error.strerror}") from error
    if head and head != _MAGIC:
        raise ConfigError(f"{path} is not a trace store: it is no SQLite file; name another one")


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    application = database.execute("PRAGMA application_id").fetchone()[0]
    version = database.execute("PRAGMA user_version").fetchone()[0]
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not tables and not application:
        path.chmod(0o600)  # prompts' lengths and models are nobody else's
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(
            f"BEGIN; {_TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    elif application != APPLICATION:
        raise ConfigError(f"{path} is not a trace store: it is another program's database; name another one")
    elif version in (1, VERSION):
        _complete(database)
    else:
        raise ConfigError(
            f"trace store {path} has version {version}, this pdserve-traces reads {VERSION}: name another file"
        )
    found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last spans, never the file


def _complete(database: sqlite3.Connection) -> None:
    """Adds the columns that an older file lacks; what is in it stays as it was."""
    there = {row[1] for row in database.execute("PRAGMA table_info(requests)")}
    lacks = [f"ALTER TABLE requests ADD COLUMN {name} {kind};" for name, kind in _SINCE_1.items() if name not in there]
    if lacks:
        database.executescript(f"BEGIN; {' '.join(lacks)} PRAGMA user_version = {VERSION}; COMMIT;")
