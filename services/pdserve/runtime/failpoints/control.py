"""Arming a process from outside: by its environment, and over a Unix socket while it runs.

The socket speaks JSON lines, one answer to each command, on a thread of its own, so that it answers
while the event loop waits at a point:

    {"do": "arm", "point": "kvd.post", "terms": "1*pause"}     {"do": "disarm" | "release", "point": ...}
    {"do": "await", "point": ..., "fired": 1, "waiting": 0, "seconds": 5}     {"do": "clear"}

The answer is the point's counts, {"hits": 1, "fired": 1, "waiting": 0}, or {"error": "why"}.
"""

import json
import os
import socketserver
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import structlog

from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime.failpoints.points import Point
from pdserve.runtime.failpoints.table import Failpoints
from pdserve.runtime.failpoints.terms import LONGEST_PAUSE_S

log = structlog.get_logger(__name__)

TERMS_VARIABLE: Final = "PDSERVE_FAILPOINTS"
"""NAME=TERMS pairs with semicolons between, armed at the start."""
SOCKET_VARIABLE: Final = "PDSERVE_FAILPOINTS_SOCKET"
"""Path of a Unix socket to be commanded over; only its owner may."""


def from_environment(failpoints: Failpoints, environ: Mapping[str, str] = os.environ) -> None:
    """Arms what the environment says, and listens where it says so, for as long as the process lives.

    Raises:
        ConfigError: terms or a point that do not exist, or a socket that cannot be bound.
    """
    for pair in filter(None, (part.strip() for part in environ.get(TERMS_VARIABLE, "").split(";"))):
        name, equals, terms = pair.partition("=")
        if not equals:
            raise ConfigError(f"{TERMS_VARIABLE}: {pair!r} is not NAME=TERMS")
        failpoints.arm(point_of(name.strip()), terms.strip())
    if path := environ.get(SOCKET_VARIABLE):
        listen(failpoints, Path(path))


def point_of(name: str) -> Point:
    """The point of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Point(name)
    except ValueError:
        raise ConfigError(f"no failpoint {name!r}; there are {', '.join(point.value for point in Point)}") from None


def listen(failpoints: Failpoints, path: Path) -> socketserver.ThreadingUnixStreamServer:
    """Answers commands at `path` until the returned server is shut down, or the process ends.

    Raises:
        ConfigError: the path cannot be bound.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(answer(failpoints, line)).encode() + b"\n")

    try:
        path.unlink(missing_ok=True)  # of a process that was killed
        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    except OSError as error:
        raise ConfigError(f"failpoint socket {path}: {error.strerror}") from error
    server.daemon_threads = True
    path.chmod(0o600)
    threading.Thread(target=server.serve_forever, name="failpoints", daemon=True).start()
    log.warning("failpoints_listening", path=str(path), means="whoever can open it can make this process fail")
    return server


def answer(failpoints: Failpoints, line: bytes) -> dict[str, Any]:
    """What a command does, and what it is told."""
    try:
        command = json.loads(line)
        do = command["do"]
        if do == "clear":
            failpoints.clear()
            return {}
        point = point_of(command["point"])
        if do == "arm":
            failpoints.arm(point, str(command["terms"]))
        elif do == "disarm":
            failpoints.disarm(point)
        elif do == "release":
            failpoints.release(point)
        elif do == "await":
            seconds = min(float(command.get("seconds", 5.0)), LONGEST_PAUSE_S)
            fired, waiting = int(command.get("fired", 0)), int(command.get("waiting", 0))
            return asdict(failpoints.await_count(point, seconds, fired=fired, waiting=waiting))
        else:
            raise ConfigError(f"no command {do!r}")
        return asdict(failpoints.count(point))
    except PdserveError as error:
        return {"error": error.message}
    except (KeyError, TypeError, ValueError) as error:
        return {"error": f"not a command: {error!r}"}
