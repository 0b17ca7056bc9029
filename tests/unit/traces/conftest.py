"""A clock that stands still unless it is moved, and a store in a folder of the test's own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.runtime.clock import Clock
from pdserve.traces.reading import Reader
from pdserve.traces.writing import Writer
from tests.unit.traces import made


@dataclass
class StoppedClock(Clock):
    """Tells the time that it was set to."""

    now: float = made.START / 1e9 + 60

    def unix(self) -> float:
        return self.now


@dataclass
class File:
    """A store's file with its writer and one reader."""

    path: Path
    max_bytes: int = 64 << 20
    max_age: float = 7 * 24 * 3600.0
    opened: list[Writer | Reader] = field(default_factory=list)

    def writer(self) -> Writer:
        self.opened.append(writer := Writer(self.path, self.max_bytes, self.max_age))
        return writer

    def reader(self) -> Reader:
        self.opened.append(reader := Reader(self.path, 30.0))
        reader.begin()
        reader.end()  # its clock runs; what is asked sees the newest
        return reader

    @property
    def size(self) -> int:
        """Of the file and its logs."""
        return sum(path.stat().st_size for path in self.path.parent.iterdir() if path.name.startswith(self.path.name))


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    made_here = File(tmp_path / "t.sqlite")
    yield made_here
    for one in reversed(made_here.opened):
        one.close()
