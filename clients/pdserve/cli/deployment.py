"""The folder of a deployment that runs on this machine: its lock, its key, and up.json that tells others of it."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from pdserve.cli.plan import Plan, Ports
from pdserve.rpc.errors import ConfigError
from pdserve.rpc.key_file import read_key_file

_RECORD = "up.json"
_LOCK = "up.lock"
_LOOPBACK = "127.0.0.1"
_TRIES = 64
"""Ports that are asked of the kernel until one is nobody else's."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running deployment, as up.json tells it."""

    grpc: str
    """Target for the SDK."""
    http: str
    """Base URL of the OpenAI API; empty: the proxy is on another node."""
    kvd: str
    """gRPC target of kvd."""
    model: str
    engine: str
    mode: str
    processes: dict[str, int]
    """Process ids by name."""
    restarts: dict[str, int]
    """How often each process has died and was started again, by name."""
    traces: str = ""
    """Base URL of the trace store; empty: the deployment keeps no traces."""
    metrics: dict[str, str] = field(default_factory=dict)
    """What Prometheus may ask: URLs by process name."""
    traces_go: str = ""
    """Where OpenTelemetry's variables send its traces instead; empty: they say nothing."""


def default_dir() -> Path:
    """$XDG_RUNTIME_DIR/pdserve, else /tmp/pdserve-UID: short, ours, gone after a reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pdserve" if runtime else Path(f"/tmp/pdserve-{os.getuid()}")


@contextlib.contextmanager
def claimed(state_dir: Path, key_file: Path | None = None) -> Iterator[Path]:
    """Makes the folder ours until exit: private, locked, with a cluster key and no old record. The key is that of
    `key_file`, or a fresh one.

    Raises:
        ConfigError: a deployment runs in it, it belongs to somebody else, or it cannot be made; or no key can be read,
            or others can read it, too.
    """
    secret = read_key_file(key_file) if key_file else f"{secrets.token_hex(32)}\n".encode()
    # Patient, because `find` holds the lock for a moment too.
    with _lock(state_dir, patience=1.0) as held:
        if not held:
            raise ConfigError(f"a deployment runs in {state_dir} already: stop it, or give another --state-dir")
        (state_dir / "logs").mkdir(exist_ok=True)
        (state_dir / _RECORD).unlink(missing_ok=True)
        key = state_dir / "cluster.key"
        if key_file and key_file.resolve() == key.resolve():
            raise ConfigError(f"the key in {key} is the deployment's own and goes with it: keep yours elsewhere")
        key.unlink(missing_ok=True)
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
        try:
            yield state_dir
        finally:
            (state_dir / _RECORD).unlink(missing_ok=True)
            key.unlink(missing_ok=True)


def publish(state_dir: Path, plan: Plan, pids: Mapping[str, int], restarts: Mapping[str, int]) -> None:
    """Writes up.json, whole or not at all."""
    spec = plan.spec
    record = Deployment(
        plan.grpc,
        plan.http,
        plan.kvd,
        spec.served_name,
        spec.engine,
        spec.mode,
        dict(pids),
        dict(restarts),
        plan.traces,
        {process.name: process.metrics for process in plan.processes if process.metrics},
        spec.traces_go,
    )
    draft = state_dir / f".{_RECORD}"
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(state_dir / _RECORD)


def find(state_dir: Path | None, instead: str = "name one with --target HOST:PORT") -> Deployment:
    """The deployment that runs in a folder; None: in the default one. `instead`: the caller's other way on.

    Raises:
        ConfigError: none runs there, or it is not ready yet.
    """
    where = state_dir or default_dir()
    found = running(where)
    if found is None:
        raise ConfigError(f"no deployment runs in {where}: start one with `pdserve up`, or {instead}")
    return found


def running(where: Path) -> Deployment | None:
    """The deployment that runs in a folder; None: none does.

    Raises:
        ConfigError: it is not ready yet.
    """
    if not (where / _LOCK).exists():
        return None
    with _lock(where) as held:
        if held:
            return None
    try:
        record: dict[str, Any] = json.loads((where / _RECORD).read_text())
        return Deployment(**record)
    except FileNotFoundError:
        raise ConfigError(f"the deployment in {where} is not ready yet") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where / _RECORD} is not what this version of pdserve writes: {error}") from None


@contextlib.contextmanager
def free_ports(
    engines: int, grpc: int, http: int, otlp: int = 0, traces: int = 0, *, host: str = _LOOPBACK, ping: int = 0
) -> Iterator[Ports]:
    """Free TCP ports; those that are named are taken where they are free, 0 for any. What other nodes reach is on
    `host`, the rest on loopback.

    Until exit they are held for our services, which bind them seconds later, and again after a death: a port that is
    only free now may be anybody's by then, the source of a connection too. A socket that is bound and does not listen
    keeps a port from all but those who bind it by number with SO_REUSEADDR, as servers do, and as another `pdserve`
    does here: from that one a name keeps it, which one process has at a time.

    Raises:
        ConfigError: no port is free, or the host is not this one.
    """
    with ExitStack() as held:

        def one(wanted: int, on: str = _LOOPBACK) -> int:
            bare = on.strip("[]")
            why: OSError | None = None
            for port in ([wanted] if wanted else []) + [0] * _TRIES:
                try:
                    return held.enter_context(_port(bare, port))
                except OSError as error:
                    why = error
                    if not port and error.errno != errno.EADDRINUSE:
                        break
            raise ConfigError(f"no TCP port is free on {bare}: {why}")

        yield Ports(
            grpc=one(grpc, host),
            http=one(http, host),
            ping=one(ping, host),
            engines=tuple(one(0, host) for _ in range(engines)),
            otlp=one(otlp),
            traces=one(traces),
            metrics=tuple(one(0) for _ in range(engines + 1)),
        )


@contextlib.contextmanager
def _port(host: str, port: int) -> Iterator[int]:
    """Holds a port of a bare host until exit, as `free_ports` says; 0: any.

    Raises:
        OSError: it cannot be had; EADDRINUSE where somebody has it.
    """
    with (
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as hold,
        socket.socket(socket.AF_UNIX) as name,
    ):
        # Also because connections that are only dying do not hold a port from services.
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold.bind((host, port))
        address, got = hold.getsockname()[:2]
        # No file: it goes with its process, and belongs to the network namespace as the port does.
        name.bind(f"\0pdserve/port/{address}/{got}")
        yield int(got)


def usable_cores() -> Sequence[int]:
    """CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def make_private(state_dir: Path) -> None:
    """Makes the folder where it is not there, and ours alone.

    Raises:
        ConfigError: it belongs to somebody else, or cannot be made.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = state_dir.lstat()
        # In a world-writable parent anybody may have made it first.
        if status.st_uid != os.getuid() or not state_dir.is_dir() or state_dir.is_symlink():
            raise ConfigError(f"{state_dir} belongs to somebody else: give another --state-dir")
        state_dir.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot use {state_dir}: {error}") from error


@contextlib.contextmanager
def _lock(state_dir: Path, patience: float = 0.0) -> Iterator[bool]:
    """Takes the folder's lock, if nobody holds it for `patience` seconds; says whether it did."""
    make_private(state_dir)
    try:
        file: IO[str] = (state_dir / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"cannot use {state_dir}: {error}") from error
    with file:
        until = time.monotonic() + patience
        while not (held := _try(file)) and time.monotonic() < until:
            time.sleep(0.05)
        yield held


def _try(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
