"""A container engine of our own, in a network namespace of its own: nothing of this machine's is touched, every port is
free, and no container reaches any network."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_START_S, _STOP_S = 40.0, 60.0
_NEEDED = ("dockerd", "docker", "unshare", "nsenter", "setpriv", "ip", "iptables")


class CannotStart(Exception):
    """No engine can be started here; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    host: str
    """For DOCKER_HOST."""
    enter: tuple[str, ...]
    """Puts a command into its network; empty: it is in this one."""


def existing() -> Engine | None:
    """The engine that the docker command reaches already, if any."""
    if shutil.which("docker") is None:
        return None
    return Engine(os.environ.get("DOCKER_HOST", ""), ()) if _answers(os.environ.get("DOCKER_HOST", "")) else None


@contextlib.contextmanager
def private(data: Path) -> Iterator[Engine]:
    """Starts one with its images in `data`, which stays, and stops it at exit.

    Raises:
        CannotStart: a program or a right is missing, or it does not come up.
    """
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise CannotStart(f"not installed: {', '.join(missing)} (apt-get install docker.io iptables iproute2)")
    if os.geteuid() != 0:
        raise CannotStart("an engine of one's own needs root")
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pdserve-engine-") as name:
        folder = Path(name)
        host = f"unix://{folder}/docker.sock"
        flags = f"-H {host} --data-root {data} --exec-root {folder}/exec -p {folder}/pid --log-level warn"
        script = f"ip link set lo up && exec dockerd {flags}"
        with (folder / "log").open("wb") as log:
            # It ends with us, also where we are killed.
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "unshare", "--net", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            until = time.monotonic() + _START_S
            while not _answers(host):
                if daemon.poll() is not None or time.monotonic() > until:
                    said = (folder / "log").read_text(errors="replace")[-2000:]
                    raise CannotStart(f"dockerd does not come up within {_START_S:g} s:\n{said}")
                time.sleep(0.2)
            yield Engine(host, ("nsenter", f"--net=/proc/{daemon.pid}/ns/net", "--"))
        finally:
            _end(daemon)
            _unmount(folder)


def _answers(host: str) -> bool:
    command = ["docker", *(("--host", host) if host else ()), "version", "--format", "{{.Server.Version}}"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _unmount(folder: Path) -> None:
    """What the daemon has left mounted: the host's network namespace, once a container was in it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{folder}/")]):
        subprocess.run(["umount", mount], check=False, timeout=_STOP_S)


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(_STOP_S)
