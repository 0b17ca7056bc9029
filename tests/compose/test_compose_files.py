"""The files by themselves: what compose makes of every combination, without an engine. `docker compose config` finds
unknown keys, undefined names and cycles; what it passes over is looked at here."""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvd.__main__ import parse
from pdserve.kvd.config import TransportName
from tests.compose.deployment import COMPOSE, SERVICES

COMBINATIONS = [
    (),
    ("scale.yaml",),
    ("cuda.yaml",),
    ("cuda.yaml", "scale.yaml"),
    ("rocm.yaml",),
    ("vllm.yaml",),
    ("vllm.yaml", "scale.yaml"),
    ("two-node.yaml",),
    ("two-node.yaml", "cuda.yaml"),
    ("two-node.yaml", "rocm.yaml"),
    ("two-node.yaml", "vllm.yaml"),
    ("no-jaeger.yaml",),
    ("vllm.yaml", "no-jaeger.yaml"),
    ("two-node.yaml", "no-jaeger.yaml"),
]
# A host network, or a node, has one port 9001: a second engine of a kind could not start.
PARSED_ONLY = [
    ("rocm.yaml", "scale.yaml"),
    ("two-node.yaml", "scale.yaml"),
    ("two-node.yaml", "cuda.yaml", "scale.yaml"),
    ("two-node.yaml", "vllm.yaml", "scale.yaml"),
    ("two-node.yaml", "rocm.yaml", "scale.yaml"),
]


@functools.cache
def services(compose: Path, files: tuple[str, ...], *variables: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """The services that `docker compose config` makes of compose.yaml and overrides, with every profile, without an
    .env, and with no variable but these."""
    options = [word for name in ("compose.yaml", *files) for word in ("-f", str(COMPOSE / name))]
    command = [str(compose), "--env-file", os.devnull, *options, "--profile", "*", "config", "--format", "json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")} | dict(variables)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(files)}: {done.stderr}"
    assert not done.stderr, done.stderr  # a variable that is not set is a warning
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return found


def words_of(service: dict[str, Any]) -> list[str]:
    """What a container runs."""
    return [*(service.get("entrypoint") or ()), *(service.get("command") or ())]


@pytest.mark.parametrize("files", [*COMBINATIONS, *PARSED_ONLY], ids=" ".join)
def test_every_combination_is_valid(compose: Path, files: tuple[str, ...]) -> None:
    """compose.yaml with each combination of overrides is accepted."""
    assert {"proxy", "prefill", "decode", "kvd", "jaeger"} <= set(services(compose, files))


def test_without_jaeger_nothing_is_pulled(compose: Path) -> None:
    """no-jaeger.yaml needs no image but the one that is built, at Jaeger's ports; of another build it is told."""
    found = services(compose, ("no-jaeger.yaml",))
    assert {found[name]["image"] for name in SERVICES} == {"pdserve:local"}
    assert {found[name].get("pull_policy", "never") for name in SERVICES} == {"never"}
    assert found["jaeger"]["ports"] == services(compose, ())["jaeger"]["ports"]
    told = services(compose, ("vllm.yaml", "no-jaeger.yaml"), ("PDSERVE_IMAGE", "pdserve-vllm:local"))
    assert {told[name]["image"] for name in SERVICES} == {"pdserve-vllm:local"}


@pytest.mark.parametrize("files", COMBINATIONS, ids=" ".join)
def test_no_service_publishes_ports_of_a_host_network(compose: Path, files: tuple[str, ...]) -> None:
    """What shares the host's network has no `ports` and no service's name in its command: neither works there."""
    for name, service in services(compose, files).items():
        if service.get("network_mode") == "host":
            assert not service.get("ports"), name
            words = " ".join([*words_of(service), *service.get("environment", {}).values()])
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
            secrets = {secret["source"]: secret["target"] for secret in service["secrets"]}
            assert secrets.pop("cluster_key") == "/run/secrets/cluster_key", name
            # The certificate and its key are for kvd alone.
            assert not secrets or (name == "kvd" and set(secrets) == {"peer_cert", "peer_key", "peer_ca"}), name
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert service["stop_grace_period"] == "45s", name


@pytest.mark.parametrize("override", ["vllm.yaml", "cuda.yaml", "rocm.yaml"])
def test_up_waits_for_a_model_to_load(compose: Path, override: str) -> None:
    """An engine that loads a model is given time for it, and the proxy, which is ready after both, as much."""
    found = services(compose, (override,))
    patience = {name: found[name]["healthcheck"]["start_period"] for name in ("prefill", "decode", "proxy")}
    assert len(set(patience.values())) == 1, patience
    assert patience["proxy"] in ("10m0s", "30m0s")


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


KVD = {
    (): (TransportName.SHM, "0.0.0.0", 9101),
    ("cuda.yaml",): (TransportName.GPU_IPC, "0.0.0.0", 9101),
    ("rocm.yaml",): (TransportName.GPU_IPC, "127.0.0.1", 9110),
    ("two-node.yaml",): (TransportName.NIXL, "127.0.0.1", 9101),
    ("two-node.yaml", "cuda.yaml"): (TransportName.NIXL, "127.0.0.1", 9101),
    ("two-node.yaml", "rocm.yaml"): (TransportName.NIXL, "127.0.0.1", 9110),
}
"""Transport of kvd, and where it shows its metrics."""


@pytest.mark.parametrize("files", KVD, ids=" ".join)
def test_kvd_moves_what_its_engines_have(
    compose: Path, files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvd takes the flags that each combination gives it. On one node of GPUs they are for GPU memory, without a word
    of the operator's, on two nodes for the other node; and PDSERVE_KVD_ARGS has the last word."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("a key of the tests, which is long enough\n")
    monkeypatch.setenv("PDSERVE_CLUSTER_KEY_FILE", str(key))
    program, *words = words_of(services(compose, files)["kvd"])
    config, _ = parse(words)
    assert program == "pdserve-kvd"
    assert (config.transport, config.metrics.host, config.metrics.port) == KVD[files]
    assert config.peer.on == ("two-node.yaml" in files)
    told = services(compose, files, ("PDSERVE_KVD_ARGS", "--transport sim"))["kvd"]
    config, _ = parse(words_of(told)[1:])
    assert config.transport is TransportName.SIM


def test_one_of_two_nodes_says_where_it_is(compose: Path) -> None:
    """With an address of its own, every port that the other node asks is published there and the engines advertise it;
    kvd listens at it, with a certificate; no engine waits for a proxy of its own node."""
    variables = (("PDSERVE_NODE_ADDRESS", "192.0.2.7"), ("PDSERVE_PROXY_ADDRESS", "192.0.2.8:50051"))
    found = services(compose, ("two-node.yaml",), *variables)
    published = {
        name: [int(port["published"]) for port in found[name].get("ports", []) if port.get("host_ip") == "192.0.2.7"]
        for name in ("kvd", "prefill", "decode", "proxy")
    }
    assert published == {"kvd": [], "prefill": [9001], "decode": [9002], "proxy": [50051]}
    for kind in ("prefill", "decode"):
        words = found[kind]["command"]
        assert "--advertise-host=192.0.2.7" in words
        assert words[words.index("--proxy") + 1] == "192.0.2.8:50051"
        assert list(found[kind]["depends_on"]) == ["kvd"]
    words = found["kvd"]["command"]
    assert words[words.index("--peer-listen") + 1] == "192.0.2.7:50052"
    assert "--insecure" not in words
    assert found["kvd"]["build"]["args"]["LOCK"] == "nixl"


def test_certificates_are_for_their_node(tmp_path: Path) -> None:
    """certs.sh: one CA, and for each address or name a certificate that it has signed and that names nothing else; a
    further node later gets one of the same CA; nobody else reads a key."""
    for addresses in (("192.0.2.7", "node-b"), ("2001:db8::1",)):
        subprocess.run([COMPOSE / "certs.sh", tmp_path, *addresses], check=True, timeout=30)
    for address, name in (("192.0.2.7", "IP Address:192.0.2.7"), ("node-b", "DNS:node-b"), ("2001:db8::1", "IP Add")):
        pem = tmp_path / f"{address}.pem"
        subprocess.run(["openssl", "verify", "-CAfile", tmp_path / "ca.pem", pem], check=True, timeout=30)
        told = subprocess.run(
            ["openssl", "x509", "-in", pem, "-noout", "-ext", "subjectAltName"],
            capture_output=True, text=True, check=True, timeout=30,
        ).stdout  # fmt: skip
        assert name in told
        assert "," not in told
        assert (tmp_path / f"{address}.key").stat().st_mode & 0o077 == 0


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
        if name not in ("PDSERVE_OTLP_ENDPOINT", "PDSERVE_PROXY_ADDRESS", "PDSERVE_NODE_ADDRESS"):
            assert used[name] == {value}, name
        else:  # rocm.yaml has all on loopback, and no port is published at no address
            assert value in used[name], name
    for before, line in itertools.pairwise(lines):
        if not before:
            assert not line or line.startswith("#"), f"{line} has no comment before it"
