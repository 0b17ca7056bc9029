"""The repository keeps the shape that packaging and imports rely on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("protos", "kvd", "services", "clients")


def test_stubs_are_what_the_generator_makes(tmp_path: Path) -> None:
    """The checked-in stubs are those of the .proto files beside them."""
    subprocess.run(
        [sys.executable, ROOT / "protos" / "generate.py", tmp_path], check=True, capture_output=True, timeout=60
    )
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    kept = {
        path.relative_to(ROOT / "protos"): path.read_text()
        for path in (ROOT / "protos" / "pdserve").rglob("*_pb2*.py*")
        if "__pycache__" not in path.parts
    }
    assert made.keys() == kept.keys()
    assert [str(name) for name in made if made[name] != kept[name]] == []


@pytest.mark.parametrize("source", SOURCES)
def test_the_namespace_has_no_init(source: str) -> None:
    """`pdserve` is one namespace over four roots: an __init__.py in one would hide the others."""
    assert not (ROOT / source / "pdserve" / "__init__.py").exists()


def test_every_package_is_typed() -> None:
    """Each package tells type checkers that it is typed."""
    packages = [path for source in SOURCES[1:] for path in (ROOT / source / "pdserve").iterdir() if path.is_dir()]
    assert packages
    assert [str(path) for path in packages if path.name != "__pycache__" and not (path / "py.typed").exists()] == []


@pytest.mark.parametrize("module", ["pdserve.client", "pdserve.cli.__main__"])
def test_the_client_is_light(module: str) -> None:
    """Importing the SDK or the command loads nothing but grpc and protobuf."""
    heavy = ("torch", "vllm", "zmq", "msgspec", "numpy", "structlog", "aiohttp", "tokenizers", "transformers")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]"
