"""`pdserve up`: kvd, engines and proxy as separate processes here, until Ctrl-C drains them."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli import extras, options, restarts, up_node
from pdserve.cli.traces import OTLP_PORT
from pdserve.cli.traces import PORT as TRACES_PORT
from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.rpc.key_file import exposed

if TYPE_CHECKING:
    from pdserve.cli.board import Board
    from pdserve.cli.fleet import Fleet
    from pdserve.cli.gpus import Shares
    from pdserve.cli.plan import Plan, Ports, Spec

GRPC_PORT, HTTP_PORT = 50050, 8000
_ELSE = "if it is free, else another; default"
_OR_NOT = "if it is free, else another, or with --host an error; default"
TAKES_REST = True
DEFAULT_MODEL = "smollm2-135m"
_WATCH = 2.0
"""Seconds between two looks at a running deployment."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the deployment consists of and where it lives."""
    parser.epilog = "What follows `--` goes to every engine: vLLM's own arguments, or flags of the sim engine."
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="folder, Hugging Face name, or smollm2-135m, which is fetched; default"
    )
    parser.add_argument("--served-model-name", default="", help="what clients call it; default: after --model")
    parser.add_argument("--prefill", type=int, default=None, metavar="N", help="engines tuned for prefill; default 1")
    parser.add_argument("--decode", type=int, default=None, metavar="N", help="engines tuned for decode; default 1")
    parser.add_argument("--both", type=int, default=0, metavar="N", help="engines that serve whole requests; default 0")
    parser.add_argument("--mode", choices=("read", "write"), default="", help="how KV is handed over; default read")
    parser.add_argument("--on-failure", choices=("fail", "recompute"), default="", help="when a hand-over fails")
    parser.add_argument(
        "--hold-timeout",
        type=options.patience,
        metavar="S",
        help="seconds that a request is held while no engines could serve it; 0: not at all; default the proxy's, 5",
    )
    parser.add_argument(
        "--gpus-per-engine",
        type=options.times,
        metavar="N",
        help="GPUs of its own that each vLLM engine gets; 0: all engines see all of them; default: its "
        "--tensor-parallel-size, where there are GPUs",
    )
    parser.add_argument("--pin", action="store_true", help="each engine on a core of its own")
    parser.add_argument(
        "--restarts",
        type=options.times,
        default=restarts.DEFAULT,
        metavar="N",
        help=f"how often each process that has served is started again when it dies; default {restarts.DEFAULT}",
    )
    parser.add_argument(
        "--kvd",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of pdserve-kvd, as lease=10; repeatable",
    )
    parser.add_argument("--grpc-port", type=options.port, metavar="P", help=f"{_OR_NOT} {GRPC_PORT}")
    parser.add_argument("--http-port", type=options.port, metavar="P", help=f"{_OR_NOT} {HTTP_PORT}")
    parser.add_argument("--traces-port", type=options.port, metavar="P", help=f"{_ELSE} {TRACES_PORT}")
    parser.add_argument("--no-traces", action="store_true", help="keep no traces of requests")
    parser.add_argument("--state-dir", type=Path, metavar="FOLDER", help="for sockets, key and logs; a short path")
    parser.add_argument("--start-timeout", type=options.seconds, default=300.0, metavar="S", help="default 300 s")
    parser.add_argument("--drain-timeout", type=options.seconds, default=30.0, metavar="S", help="default 30 s")
    up_node.arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Starts the deployment and keeps it until a signal; 0 after a drain."""
    extras.check_services("up", args.engine)
    spec = spec_of(args)
    from pdserve.cli import deployment, plan
    from pdserve.cli.board import Board

    board = Board(sys.stdout, terminal=sys.stdout.isatty())
    key_file, host, ping = up_node.binds(spec.node)
    wanted = WantedPorts.of(spec, args)
    with (
        deployment.claimed((args.state_dir or deployment.default_dir()).absolute(), key_file) as state_dir,
        deployment.free_ports(
            *(len(plan.engine_names(spec)), wanted.grpc, wanted.http, wanted.otlp, wanted.traces), host=host, ping=ping
        ) as ports,
    ):
        if key_file and (why := exposed(key_file)):
            board.say(f"warning: {why}")
        if ping and ports.ping != ping:
            raise ConfigError(
                f"port {ping} of {host} is taken, and other nodes' engines are to register there: "
                "give all nodes another --ping-port"
            )
        for face, asked, got in wanted.of_the_proxy(ports):
            if spec.node and asked and got != asked:
                raise ConfigError(
                    f"port {asked} of {host} is taken, and other nodes were told to find {face} there: "
                    f"give --{face.lower()}-port another, or 0 for any"
                )
        return asyncio.run(_serve(spec, state_dir, args, wanted, board, ports))


@dataclass(frozen=True, slots=True)
class WantedPorts:
    """For what people look for; 0: any, also where the deployment does not have it, or it would keep the port from one
    that does."""

    grpc: int
    http: int
    otlp: int
    traces: int

    def of_the_proxy(self, ports: "Ports") -> list[tuple[str, int, int]]:
        """What each of the proxy's faces is called, and the port that was wanted and that is had for it."""
        return [("gRPC", self.grpc, ports.grpc), ("HTTP", self.http, ports.http)]

    @classmethod
    def of(cls, spec: "Spec", args: argparse.Namespace) -> "WantedPorts":
        """As the flags say, or by default."""

        def port(asked: int | None, usual: int, *, there: bool) -> int:
            return 0 if not there else usual if asked is None else asked

        proxy = spec.node is None or not spec.node.proxy
        return cls(
            port(args.grpc_port, GRPC_PORT, there=proxy),
            port(args.http_port, HTTP_PORT, there=proxy),
            port(None, OTLP_PORT, there=spec.traces),
            port(args.traces_port, TRACES_PORT, there=spec.traces),
        )


def spec_of(args: argparse.Namespace) -> "Spec":
    """What the flags ask for; a known model is fetched.

    Raises:
        ConfigError: counts that make no deployment, too few GPUs, or a model that is not there or cannot be fetched.
    """
    from pdserve.cli import model
    from pdserve.cli.plan import Spec

    node = up_node.of(args)
    # `--both 1` alone asks for a colocated deployment, not for a pair beside it.
    pairs = 0 if args.both and args.prefill is None and args.decode is None else 1
    prefill, decode = (pairs if asked is None else asked for asked in (args.prefill, args.decode))
    on_gpus, gpus = _gpus(args, prefill + decode + args.both, node)
    folder, name = model.resolve(args.model) if args.engine == "vllm" else ("", "sim")
    return Spec(
        engine=args.engine,
        model=folder,
        served_name=args.served_model_name or name,
        prefill=prefill,
        decode=decode,
        both=args.both,
        on_gpus=on_gpus,
        gpus=gpus,
        mode=args.mode or "read",
        on_failure=args.on_failure,
        hold_timeout=args.hold_timeout,
        pin=args.pin,
        engine_args=tuple(args.rest),
        kvd_settings=tuple(args.kvd),
        traces=not args.no_traces and not traces_go_to(os.environ) and not (node and node.proxy),
        traces_go=traces_go_to(os.environ),
        node=node,
    )


def _gpus(args: argparse.Namespace, engines: int, node: up_node.Node | None) -> "tuple[bool, Shares]":
    """Whether the engines compute on GPUs, and the environment that gives each its own."""
    from pdserve.cli import gpus

    if args.engine != "vllm":
        if args.gpus_per_engine:
            raise ConfigError("--gpus-per-engine is for --engine vllm")
        return False, ()
    there = gpus.seen(Path("/"), os.environ)
    shares = gpus.share(there, engines, args.gpus_per_engine, gpus.ranks(args.rest), os.environ)
    if there and node and not any(setting.startswith("transport=") for setting in args.kvd):
        raise ConfigError(
            "nothing carries KV in memory of GPUs to another node yet: leave --host away; or say "
            "--kvd transport=gpu_ipc, and requests are handed over within this node"
        )
    return there is not None, shares


def traces_go_to(environ: Mapping[str, str]) -> str:
    """Where OpenTelemetry's variables send the proxy's traces already, if anywhere; empty: they do not say."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "nowhere, as OTEL_SDK_DISABLED says"
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return "nowhere, as OTEL_TRACES_EXPORTER says"
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if where := environ.get(name, "").strip():
            return f"{where}, as {name} says"
    return ""


async def _serve(
    spec: "Spec", state_dir: Path, args: argparse.Namespace, wanted: WantedPorts, board: "Board", ports: "Ports"
) -> int:
    from pdserve.cli import deployment, plan
    from pdserve.cli.fleet import Fleet
    from pdserve.cli.stopping import Stop

    made = plan.make_plan(spec, state_dir, ports, sys.executable, deployment.usable_cores())
    faces = wanted.of_the_proxy(ports) if made.http else []
    if made.traces:
        faces.append(("traces", wanted.traces, ports.traces))
    elif made.http and not args.no_traces:
        board.say(f"traces go to {traces_go_to(os.environ)}: no trace store is started")
    for face, asked, got in faces:
        if asked and asked != got:
            board.say(f"port {asked} is taken: {face} is on {got}")
    board.say(f"starting {len(made.processes)} processes; logs are in {made.processes[0].log.parent}")
    fleet = Fleet(made, board, grace=args.drain_timeout, restarts=args.restarts)
    stop = Stop(fleet.hurry.set)
    async with fleet:
        if not await stop.unless(fleet.start(args.start_timeout)):
            return 130
        fleet.changed = lambda: deployment.publish(state_dir, made, fleet.pids, fleet.restarts)
        fleet.changed()
        board.leave()
        elsewhere = f" --state-dir {state_dir}" if state_dir != deployment.default_dir() else ""
        board.say(how_to_call(made, elsewhere))
        await stop.unless(fleet.unless_one_dies(_watch(fleet, board)))
        board.leave()
        board.say("draining; Ctrl-C again stops at once")
    return 0


def how_to_call(made: "Plan", elsewhere: str) -> str:
    """What to do with a deployment that is ready; `elsewhere` is the flag that finds it, where one is needed."""
    http = made.http
    if not http:
        return f"""
ready, behind the proxy at {made.grpc}

  pdserve status{elsewhere}
  pdserve kvd describe{elsewhere}

Ctrl-C drains and stops.
"""
    shown = f"\n  traces  {made.traces}   (a page; Jaeger's API)" if made.traces else ""
    look = f"\n  pdserve trace --last{elsewhere}" if made.traces else ""
    body = f'{{"model": "{made.spec.served_name}", "messages": [{{"role": "user", "content": "Hi"}}], '
    body += '"max_tokens": 32, "stream": true}'
    return f"""
ready

  gRPC    {made.grpc}
  HTTP    {http}/v1   (OpenAI's API){shown}
  metrics {http}/metrics   (Prometheus; of the other processes: pdserve status{elsewhere})

  pdserve chat{elsewhere}
  pdserve generate "The capital of France is" --max-tokens 16 --temperature 0{elsewhere}{look}
  curl -N {http}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'

Ctrl-C drains and stops.
"""


async def _watch(fleet: "Fleet", board: "Board") -> None:
    """Shows the processes' states, for ever."""
    from pdserve.cli import probe

    def show(name: str, state: str, detail: str = "") -> None:
        if name not in fleet.away:  # of one that is being started again its keeper tells
            board.show(name, state, detail)

    while True:
        for process in fleet.plan.processes:
            if process.kind in ("kvd", "traces"):
                show(process.name, "ready" if await probe.serving(process.target) else "does not answer")
        try:
            for name, engine in (await fleet.engines()).items():
                tokens = f"{engine.free_kv_tokens} of {engine.total_kv_tokens} KV tokens free"
                detail = f"{engine.running} running, {engine.waiting} waiting, {tokens}"
                show(name, engine.excluded_because or engine.state, detail)
            show("proxy", "ready")
        except PdserveError as error:
            show("proxy", error.message)
        await asyncio.sleep(_WATCH)
