"""The store as the event loop sees it: one thread that writes, some that read; the loop never waits for the disk."""

import asyncio
import fcntl
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import structlog

from pdserve.rpc.errors import ConfigError, DeadlinePassed, Unavailable
from pdserve.runtime.clock import Clock
from pdserve.traces import schema
from pdserve.traces.reading import Reader, explain
from pdserve.traces.span import Span
from pdserve.traces.writing import Writer

log = structlog.get_logger(__name__)

T = TypeVar("T")

READERS = 2
READ_S, WRITE_S = 10.0, 10.0
"""Seconds that a question, and that storing a batch, may take."""
PRUNE_EVERY_S = 60.0


class Store:
    """Owns the file, its lock and the threads; close it with `aclose`."""

    def __init__(self, path: Path, max_bytes: int, max_age: float, clock: Clock) -> None:
        """Opens the file, or makes it. Blocking, for the start of a process.

        Raises:
            ConfigError: the file is somebody else's, damaged, or in use.
        """
        self._clock = clock
        self._path = path
        schema.check(path)  # before there is anything of ours beside a file that is not
        self._lock = _claim(path)
        try:
            self._writer = Writer(path, max_bytes, max_age)
        except BaseException:
            self._lock.close()
            raise
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="traces-write")
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="traces-read")
        self._local = threading.local()
        self._readers: list[Reader] = []
        self._closed = False

    async def add(self, spans: Sequence[Span]) -> Counter[str]:
        """Stores them; they are in the file when this returns.

        Returns:
            How many were not taken, by reason.

        Raises:
            DeadlinePassed: not stored in time; they may be yet.
            Unavailable: the disk does not take them now.
        """
        return await self._write(lambda: self._writer.add(spans, self._now()))

    async def ask(self, question: Callable[[Reader], T]) -> T:
        """Runs a question, which sees the store at one moment.

        Raises:
            DeadlinePassed: it takes too long.
        """
        work = asyncio.get_running_loop().run_in_executor(self._read_threads, self._read, question)
        return await _within(work, 2 * READ_S, "reading traces")  # it may have waited for a thread

    async def keep_small(self) -> None:
        """Takes out what has become too old, for ever."""
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            try:
                await self._write(lambda: self._writer.prune(self._now()))
            except Unavailable as error:
                log.warning("not_pruned", error=error.message)

    async def aclose(self) -> None:
        """Finishes what was begun and closes the file; safe twice."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._write_thread.shutdown()
        self._read_threads.shutdown()
        for reader in self._readers:
            reader.close()
        self._writer.close()
        self._lock.close()

    async def _write(self, work: Callable[[], T]) -> T:
        try:
            return await _within(
                asyncio.get_running_loop().run_in_executor(self._write_thread, work), WRITE_S, "storing spans"
            )
        except sqlite3.OperationalError as error:  # full, read-only, locked: it may pass
            log.error("not_stored", file=str(self._path), error=str(error))
            raise Unavailable(f"the trace store cannot write: {error}") from error

    def _read(self, question: Callable[[Reader], T]) -> T:
        reader: Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = Reader(self._path, READ_S)
            self._readers.append(reader)
        reader.begin()
        try:
            return question(reader)
        except sqlite3.OperationalError as error:
            raise explain(error, READ_S) from error
        finally:
            reader.end()

    def _now(self) -> int:
        return int(self._clock.unix() * 1e9)


async def _within(work: asyncio.Future[T], seconds: float, what: str) -> T:
    """Waits for work in a thread, which goes on when the wait is over."""
    done, _ = await asyncio.wait({work}, timeout=seconds)
    if not done:
        work.add_done_callback(lambda late: late.cancelled() or late.exception())  # whatever becomes of it is seen
        raise DeadlinePassed(f"{what} took longer than {seconds:g} s")
    return work.result()


def _claim(path: Path) -> IO[bytes]:
    """Holds the file for this process until it is closed."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("wb")
    except OSError as error:
        raise ConfigError(f"trace store {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another pdserve-traces has {path} open: name another file") from None
    return file
