"""What a comparison leaves in its folder, and goes on from when it was interrupted.

compare.json        settings, machine, calibration, SLO, trials, order, commands, CPU shares, curves, ratios
b-0.json            results of one configuration in one repeat (`pdserve bench report` reads them); b-0.csv
b-0.partial.json    of one that broke off; measured again when the comparison goes on
logs/               of a deployment that did not start or died
"""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from pdserve.bench import results as documents
from pdserve.bench import table
from pdserve.bench.compare.budget import Trial
from pdserve.bench.compare.configurations import Key
from pdserve.bench.compare.objectives import Calibration
from pdserve.bench.compare.settings import Settings
from pdserve.bench.results import Machine, Results
from pdserve.bench.slo import Slo
from pdserve.rpc.errors import ConfigError

SCHEMA = "pdserve.compare/1"
FILE = "compare.json"


@dataclass(frozen=True, slots=True)
class Share:
    """What processes used during one rate."""

    rate: float
    wall: float
    """Seconds."""
    cores: Mapping[str, float]
    """By process; `client` is this command, `up` keeps the deployment, `others` is the rest of the machine."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration in one repeat, whole."""

    configuration: Key
    repeat: int
    """From 0."""
    order: int
    """From 0: the how-manieth deployment with a load it was."""
    started: str
    """ISO 8601, UTC."""
    ready_after: float
    """Seconds that the deployment took to be ready."""
    command: tuple[str, ...]
    """What started it."""
    cpu: tuple[Share, ...]
    """By rate."""

    @property
    def stem(self) -> str:
        """Name of its files."""
        return stem(self.configuration, self.repeat)


@dataclass(frozen=True, slots=True)
class State:
    """What is known so far."""

    settings: Mapping[str, Any]
    machine: Machine
    schema: str = SCHEMA
    calibration: Calibration | None = None
    slo: Slo | None = None
    """Made from the calibration once; never changed."""
    trials: tuple[Trial, ...] = ()
    budget: int | None = None
    """Of the tuned pair."""
    cells: tuple[Cell, ...] = field(default=())
    """In the order of measuring."""


def stem(key: str, repeat: int) -> str:
    """Name of the files of a configuration's repeat."""
    return f"{key}-{repeat}"


class Folder:
    """See the module; made by `opened`."""

    def __init__(self, path: Path, state: State) -> None:
        self.path = path
        self.state = state

    def keep(self, **changes: Any) -> None:
        """Changes the state, and its file at once."""
        self.state = replace(self.state, **changes)
        self.write()

    def add(self, cell: Cell, results: Results) -> None:
        """Keeps a whole cell."""
        documents.save(results, self.path / f"{cell.stem}.json")
        table.save_csv(results, self.path / f"{cell.stem}.csv")
        (self.path / f"{cell.stem}.partial.json").unlink(missing_ok=True)
        others = (one for one in self.state.cells if one.stem != cell.stem)
        self.keep(cells=(*others, cell))

    def add_partial(self, key: str, repeat: int, results: Results) -> None:
        """Keeps what there is of a cell that broke off."""
        documents.save(results, self.path / f"{stem(key, repeat)}.partial.json")

    def whole(self) -> tuple[Cell, ...]:
        """The cells whose results are there, in the order of measuring."""
        return tuple(cell for cell in self.state.cells if (self.path / f"{cell.stem}.json").exists())

    def find(self, key: str, repeat: int) -> Cell | None:
        """The cell, if it was measured whole and its results are still there."""
        return next((cell for cell in self.whole() if cell.stem == stem(key, repeat)), None)

    def results(self, cell: Cell) -> Results:
        """Of a cell.

        Raises:
            ConfigError: the file cannot be read.
        """
        return documents.load(self.path / f"{cell.stem}.json")

    def write(self, **beside: Any) -> None:
        """Writes compare.json, whole or not at all; `beside`: what follows from the state, for readers.

        Raises:
            ConfigError: it cannot be written.
        """
        document = msgspec.to_builtins(self.state) | {
            name: msgspec.to_builtins(value) for name, value in beside.items()
        }
        draft = self.path / f".{FILE}"
        try:
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
            draft.replace(self.path / FILE)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path / FILE}: {error.strerror or error}") from error


@contextmanager
def opened(path: Path, settings: Settings, machine: Machine) -> Iterator[Folder]:
    """A folder that is new, or has a comparison with the same settings on the same machine.

    Raises:
        ConfigError: it has another one, or one runs in it, or it cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror or error}") from error
    with lock:
        _lock(lock, path)
        file = path / FILE
        state = _read(file) if file.exists() else State(settings.told(), machine)
        told = msgspec.to_builtins(settings.told())
        if changed := differences(state.settings, told):
            raise ConfigError(
                f"{path} has a comparison with other settings ({'; '.join(changed)}): name another folder with --out"
            )
        if (state.machine.cpu, state.machine.cores) != (machine.cpu, machine.cores):
            raise ConfigError(f"{path} has a comparison on another machine: name another folder with --out")
        yield Folder(path, state)


def differences(kept: Mapping[str, Any], told: Mapping[str, Any]) -> Sequence[str]:
    """What differs between two comparisons' settings, in words."""
    names = sorted({*kept, *told})
    return [
        f"{name}: {kept.get(name)} there, {told.get(name)} asked" for name in names if kept.get(name) != told.get(name)
    ]


def _lock(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"a comparison runs in {path} now") from None


def _read(file: Path) -> State:
    try:
        raw = msgspec.json.decode(file.read_bytes())
        said = raw.get("schema") if isinstance(raw, dict) else None
        if said != SCHEMA:
            raise ConfigError(f"{file} has the schema {said!r}, this version reads {SCHEMA!r}")
        return msgspec.convert(raw, State)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is not what a comparison writes: {error}") from error
