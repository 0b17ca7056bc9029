"""What a command says where a part of pdserve is not installed: one sentence with the extra's name, no traceback."""

import subprocess
import sys

import pytest

from pdserve.cli import extras
from pdserve.rpc.errors import ConfigError


@pytest.mark.parametrize(
    ("absent", "words", "says"),
    [
        ("structlog", "up --engine sim", "`pdserve up` needs structlog: install pdserve with the extra `node`"),
        ("grpc_health", "demo --engine sim", "`pdserve demo` needs grpc_health: install pdserve with the extra `node`"),
        ("zmq", "up", "`pdserve up` needs zmq: install pdserve with the extra `node`"),
        ("vllm", "up", "`pdserve up` needs vllm: it comes with the vendor's image"),
        ("opentelemetry", "traces", "`pdserve traces` needs opentelemetry.sdk: install pdserve with the extra `node`"),
    ],
)
def test_a_light_installation_says_what_is_missing(absent: str, words: str, says: str) -> None:
    """Before anything is fetched or started."""
    code = f"import sys; sys.modules[{absent!r}] = None; from pdserve.cli.__main__ import main; "
    code += f"sys.exit(main({words.split()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"pdserve: {says}")
    assert done.stderr.endswith("(CONFIG)\n")
    assert not done.stdout


def test_vllm_is_needed_for_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated engines start without it."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    extras.check_services("up", "sim")
    with pytest.raises(ConfigError, match="--engine sim"):
        extras.check_services("up", "vllm")
