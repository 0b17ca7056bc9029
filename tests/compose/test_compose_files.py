"""The files by themselves: what compose makes of every combination, without an engine. `docker compose config` finds
unknown keys, undefined names and cycles; what it passes over is looked at here."""

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compose.deployment import COMPOSE, STANDIN

COMBINATIONS = [
    (),
    ("scale.yaml",),
    ("cuda.yaml",),
    ("cuda.yaml", "scale.yaml"),
    ("rocm.yaml",),
]
# A host network has one port 9001: rocm.yaml with scale.yaml parses, and its second engine of a kind could not start.
PARSED_ONLY = [("rocm.yaml", "scale.yaml")]


def config(compose: Path, files: tuple[str, ...], *words: str) -> str:
    """`docker compose config` of compose.yaml and overrides, with every profile and without an .env."""
    options = [word for name in ("compose.yaml", *files) for word in ("-f", str(COMPOSE / name))]
    command = [str(compose), "--env-file", os.devnull, *options, "--profile", "*", "config", *words]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(files)}: {done.stderr}"
    assert not done.stderr, done.stderr  # a variable that is not set is a warning
    return done.stdout


def services(compose: Path, files: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The merged services."""
    found: dict[str, dict[str, Any]] = json.loads(config(compose, files, "--format", "json"))["services"]
    return found


@pytest.mark.parametrize("files", [*COMBINATIONS, *PARSED_ONLY, (str(STANDIN),)], ids=" ".join)
def test_every_combination_is_valid(compose: Path, files: tuple[str, ...]) -> None:
    """compose.yaml with each combination of overrides, and with the tests' own, is accepted."""
    config(compose, files, "--quiet")


@pytest.mark.parametrize("files", COMBINATIONS, ids=" ".join)
def test_no_service_publishes_ports_of_a_host_network(compose: Path, files: tuple[str, ...]) -> None:
    """What shares the host's network has no `ports` and no service's name in its command: neither works there."""
    for name, service in services(compose, files).items():
        if service.get("network_mode") == "host":
            assert not service.get("ports"), name
            words = " ".join([*service["command"], *service.get("environment", {}).values()])
            assert not re.search(r"\b(proxy|jaeger|prefill|decode|kvd):\d", words), (name, words)


@pytest.mark.parametrize("files", COMBINATIONS, ids=" ".join)
def test_our_services_run_with_as_little_as_they_need(compose: Path, files: tuple[str, ...]) -> None:
    """Not as root, on a file system that cannot be written, with no capability, with the key as a file, and with a
    grace that is longer than a drain."""
    for name, service in services(compose, files).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        if name in ("kvd", "prefill", "decode", "proxy"):
            assert service["user"] == "10001:10001", name
            assert service["init"], name
            assert service["secrets"] == [{"source": "cluster_key", "target": "/run/secrets/cluster_key"}], name
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert service["stop_grace_period"] == "45s", name


@pytest.mark.parametrize("override", ["cuda.yaml", "rocm.yaml"])
def test_gpu_services_are_built_on_the_vendors_image(compose: Path, override: str) -> None:
    """kvd's build is the vendor's Dockerfile with the vendor's base, and every service with the GPU image gets vLLM on
    GPUs of its own."""
    found = services(compose, (override,))
    build = found["kvd"]["build"]
    assert build["dockerfile"] == "deploy/compose/Dockerfile.vendor"
    assert "target" not in build
    assert "vllm" in build["args"]["BASE"]
    variable = "CUDA_VISIBLE_DEVICES" if override == "cuda.yaml" else "HIP_VISIBLE_DEVICES"
    gpus = [set(found[kind]["environment"][variable].split(",")) for kind in ("prefill", "decode")]
    assert [len(one) for one in gpus] == [4, 4]
    assert not gpus[0] & gpus[1]
    for kind in ("kvd", "prefill", "decode"):
        assert found[kind]["image"] == "pdserve-gpu:local"
        assert found[kind]["ipc"] == found[kind]["pid"] == "host"
        assert found[kind]["ulimits"]["memlock"] in (-1, {"soft": -1, "hard": -1})


def test_init_makes_a_key_once_that_nobody_else_reads(tmp_path: Path) -> None:
    """Where there is none, a key and an .env are made; a second run leaves both as they are."""
    (tmp_path / "secrets").mkdir()
    for name in ("init.sh", ".env.example"):
        shutil.copy(COMPOSE / name, tmp_path / name)
    subprocess.run([tmp_path / "init.sh"], check=True, timeout=30)
    key, env = tmp_path / "secrets" / "cluster.key", tmp_path / ".env"
    made = key.read_bytes(), env.read_bytes()
    status = key.stat()
    assert (status.st_mode & 0o777, len(made[0].strip()) >= 32) == (0o600, True)
    assert f"PDSERVE_UID={status.st_uid}\n" in env.read_text()
    subprocess.run([tmp_path / "init.sh"], check=True, timeout=30)
    assert (key.read_bytes(), env.read_bytes()) == made


def test_the_example_explains_every_variable_and_no_other() -> None:
    """`.env.example` has each variable that a file reads, with the default that the file has, behind a comment."""
    used: dict[str, set[str]] = {}
    for path in COMPOSE.glob("*.yaml"):
        for name, default in re.findall(r"\$\{(PDSERVE_\w+):-([^}]*)\}", path.read_text()):
            used.setdefault(name, set()).add(default)
        assert not re.search(r"\$\{\w+\}", path.read_text()), f"{path.name} has a variable without a default"
    lines = (COMPOSE / ".env.example").read_text().splitlines()
    said = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert sorted(said) == sorted(used)
    for name, value in said.items():
        if name != "PDSERVE_OTLP_ENDPOINT":  # rocm.yaml has Jaeger on loopback
            assert used[name] == {value}, name
    for before, line in itertools.pairwise(lines):
        if not before:
            assert not line or line.startswith("#"), f"{line} has no comment before it"
