"""Makes the Python stubs beside the .proto files, or into another folder.

Run with the `gen` group of pyproject.toml installed: `python protos/generate.py [OUT_DIR]`.
"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes all stubs below `out`, laid out as the .proto files are.

    Raises:
        RuntimeError: protoc refused a file.
    """
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("pdserve/api/*/v1/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--proto_path={well_known}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    for proto in protos:
        if "\nservice " in (ROOT / proto).read_text():
            continue
        for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):  # empty: a file of messages only
            (out / proto.replace(".proto", suffix)).unlink(missing_ok=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
