"""What processes a deployment on this machine consists of, and how each is started; pure.

kvd ── unix:STATE/kvd.sock        one, owns the KV memory of the engines
prefill-0.., decode-0.., both-0..  engines, one process each
traces ── OTLP, HTTP               where the proxy's traces are kept, unless they go elsewhere
proxy ── gRPC, HTTP, registration  what clients talk to
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pdserve.cli.up_node import Node, at
from pdserve.rpc.errors import ConfigError

Kind = Literal["kvd", "engine", "traces", "proxy"]

MAX_SOCKET_PATH = 107
"""Bytes of the longest Unix socket path that Linux takes."""
_LONGEST_SOCKET = "notices.sock"
KVD_SOCKET = "kvd.sock"
"""Name of kvd's gRPC socket in its state folder, as `pdserve-kvd` has it too."""
_HOST = "127.0.0.1"
TRACES_FILE = "traces.sqlite"
"""In the state folder: the traces of earlier deployments in it are there too, and stay when it ends."""
_TRACES_BYTES = 64 << 20
"""Some thousand requests. The state folder may lie in memory."""
_OURS = ("socket", "state-dir", "cluster-key-file", "metrics-host", "metrics-port")
"""Settings of kvd that a deployment makes itself."""
_SILENCE = 15
"""Beats that an engine may miss. On one machine a death is told by a broken connection, at once; silence mostly means
that the machine is busy."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A deployment as it was asked for."""

    engine: Literal["vllm", "sim"] = "vllm"
    """What computes: vLLM, or the simulated engine that needs no model."""
    model: str = ""
    """Folder or Hugging Face name for vLLM; ignored by sim."""
    served_name: str = ""
    """Name that clients ask for."""
    prefill: int = 1
    """Engines tuned for prefill."""
    decode: int = 1
    """Engines tuned for decode."""
    both: int = 0
    """Engines that serve whole requests alone."""
    mode: Literal["read", "write"] = "read"
    """How KV travels where a request does not say."""
    on_failure: Literal["", "fail", "recompute"] = ""
    """What a failed hand-over does where a request does not say; empty: the proxy's default."""
    hold_timeout: float | None = None
    """Seconds that the proxy holds a request while no engines could serve it; None: the proxy's default."""
    pin: bool = False
    """Each engine on a core of its own, in turn."""
    engine_args: tuple[str, ...] = ()
    """vLLM's own arguments, or the sim engine's flags; passed to every engine unchanged."""
    kvd_settings: tuple[str, ...] = ()
    """NAME=VALUE: `pdserve-kvd --NAME=VALUE`."""
    traces: bool = False
    """Keep the proxy's traces in a store of the deployment's own."""
    traces_go: str = ""
    """Where OpenTelemetry's variables send them instead, in words; empty: they say nothing."""
    node: Node | None = None
    """One of several nodes, with what it has of the deployment; None: this machine has it all."""
    on_gpus: bool = False
    """The engines' KV lies in memory of GPUs."""
    gpus: tuple[Mapping[str, str], ...] = ()
    """The environment that gives each engine GPUs of its own, in the order of `engine_names`; empty: each sees all."""

    def __post_init__(self) -> None:
        for setting in self.kvd_settings:
            name, equals, value = setting.partition("=")
            if not (name and equals and value) or name.startswith("-"):
                raise ConfigError(f"kvd setting {setting!r} is not NAME=VALUE, as lease=10")
            if name in _OURS:
                raise ConfigError(f"kvd's {name} is the deployment's to set")
        if min(self.prefill, self.decode, self.both) < 0 or self.prefill + self.decode + self.both == 0:
            raise ConfigError("a deployment needs at least one engine")
        if (self.prefill == 0) != (self.decode == 0) and self.node is None:
            raise ConfigError(
                "prefill and decode engines come in pairs: one kind alone can answer nothing, "
                "unless it is one of several nodes (--host)"
            )


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports, all free when they were chosen: on loopback, but for the first four on the node's own address where
    it is one of several."""

    grpc: int
    http: int
    ping: int
    """Where engines register with the proxy."""
    engines: tuple[int, ...]
    """One per engine, in the order of `engine_names`."""
    otlp: int = 0
    """Where the proxy sends its traces; only with Spec.traces, as the next one."""
    traces: int = 0
    """Where they are looked at."""
    metrics: tuple[int, ...] = ()
    """Where Prometheus asks kvd and each engine, in this order; none: nowhere. The proxy is asked at `http`."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process, ready to be started."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    target: str
    """gRPC address of its health service."""
    log: Path
    """File that takes its stdout and stderr."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process' environment."""
    core: int | None = None
    """CPU that it is pinned to; None: any."""
    metrics: str = ""
    """URL of what it tells Prometheus; empty: it tells nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment's processes in the order of starting, and where it is reached."""

    spec: Spec
    processes: tuple[Process, ...]
    grpc: str
    """Target for the SDK."""
    http: str
    """Base URL of the OpenAI API; empty: the proxy is on another node."""
    kvd: str
    """gRPC target of kvd."""
    traces: str = ""
    """Base URL of the trace store; empty: there is none."""


def engine_names(spec: Spec) -> tuple[str, ...]:
    """Names of the engine processes, prefill first."""
    counts = (("prefill", spec.prefill), ("decode", spec.decode), ("both", spec.both))
    return tuple(f"{role}-{index}" for role, count in counts for index in range(count))


def make_plan(spec: Spec, state_dir: Path, ports: Ports, python: str, cores: Sequence[int]) -> Plan:
    """The processes of a deployment.

    Args:
        spec: what was asked for.
        state_dir: folder for sockets, the cluster key (`cluster.key`) and `logs/`.
        ports: where to listen.
        python: interpreter that runs the services.
        cores: CPUs that may be used, for `spec.pin`.

    Raises:
        ConfigError: `state_dir` is too long for a Unix socket in it.
    """
    size = len(str(state_dir / _LONGEST_SOCKET).encode())
    if size > MAX_SOCKET_PATH:
        raise ConfigError(f"state folder {state_dir} is too long: a socket in it would have {size} bytes")
    socket = state_dir / KVD_SOCKET
    env = {"PDSERVE_CLUSTER_KEY_FILE": str(state_dir / "cluster.key"), "PYTHONUNBUFFERED": "1"}
    logs = state_dir / "logs"
    asked = dict(zip(("kvd", *engine_names(spec)), ports.metrics, strict=True)) if ports.metrics else {}
    node = spec.node
    host = node.host if node else _HOST
    http = at(host, ports.http)

    def process(name: str, kind: Kind, module: str, flags: Sequence[str], target: str, core: int | None) -> Process:
        shown = http if kind == "proxy" else at(_HOST, asked[name]) if name in asked else ""
        if name in asked:
            flags = ("--metrics-host", _HOST, "--metrics-port", str(asked[name]), *flags)
        return Process(
            name,
            kind,
            (python, "-m", module, *flags),
            target,
            logs / f"{name}.log",
            env=env,
            core=core,
            metrics=f"http://{shown}/metrics" if shown else "",
        )

    flags = ["--socket", str(socket), "--state-dir", str(state_dir), *(node.kvd_flags() if node else ())]
    if spec.on_gpus and spec.prefill + spec.decode:
        flags += ["--transport=gpu_ipc"]  # the settings come behind and are the last word
    flags += [f"--{setting}" for setting in spec.kvd_settings]
    processes = [process("kvd", "kvd", "pdserve.kvd", flags, f"unix:{socket}", None)]
    registers = node.registration() if node and node.proxy else at(host, ports.ping)
    for index, (name, port) in enumerate(zip(engine_names(spec), ports.engines, strict=True)):
        role = name.rpartition("-")[0]
        module = "pdserve.prefill" if role == "prefill" else "pdserve.decode"
        flags = ["--engine", spec.engine, "--role", role, "--host", host, "--port", str(port)]
        flags += ["--proxy", registers]
        if role != "both":  # an engine that serves alone is plain: nothing of it is kvd's
            flags += ["--kvd-socket", str(socket)]
        if spec.engine == "vllm":
            flags += ["--model", spec.model]
        if spec.served_name:
            flags += ["--served-model-name", spec.served_name]
        # vLLM's arguments go after `--`; the sim engine's are flags of the service itself.
        flags += ["--", *spec.engine_args] if spec.engine == "vllm" and spec.engine_args else spec.engine_args
        core = cores[index % len(cores)] if spec.pin and cores else None
        engine = process(name, "engine", module, flags, at(host, port), core)
        processes.append(replace(engine, env={**env, **spec.gpus[index]}) if spec.gpus else engine)
    if node and node.proxy:
        return Plan(spec, tuple(processes), node.proxy, "", processes[0].target)
    flags = ["--host", host, "--grpc-port", str(ports.grpc), "--http-port", str(ports.http)]
    flags += ["--ping-port", str(ports.ping), "--mode", spec.mode, "--beats-missed", str(_SILENCE)]
    if not spec.prefill and (node is None or not spec.decode):
        flags += ["--route", "split_or_colocated"]  # there will never be a pair, or none of this node's
    if spec.on_failure:
        flags += ["--on-failure", spec.on_failure]
    if spec.hold_timeout is not None:
        flags += ["--hold-timeout", str(spec.hold_timeout)]
    proxy = process("proxy", "proxy", "pdserve.proxy", flags, at(host, ports.grpc), None)
    traces = ""
    if spec.traces:
        flags = ["--host", _HOST, "--otlp-port", str(ports.otlp), "--port", str(ports.traces)]
        flags += ["--file", str(state_dir / TRACES_FILE), "--max-bytes", str(_TRACES_BYTES)]
        store = process("traces", "traces", "pdserve.traces", flags, f"{_HOST}:{ports.otlp}", None)
        processes.append(store)
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{store.target}", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
        told["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "grpc"  # whatever the caller's own collector speaks
        proxy = replace(proxy, env={**env, **told})
        traces = f"http://{_HOST}:{ports.traces}"
    processes.append(proxy)
    return Plan(spec, tuple(processes), proxy.target, f"http://{http}", processes[0].target, traces)
