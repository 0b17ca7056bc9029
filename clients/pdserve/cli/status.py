"""`pdserve status`: the engines behind a proxy and what they are doing, and a deployment's processes."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from pdserve.cli import options

if TYPE_CHECKING:
    from pdserve.cli.deployment import Deployment


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --json and which proxy to ask."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timeout", type=options.seconds, default=10.0, metavar="S", help="seconds; default 10")
    options.add_target(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the topology, and addresses and processes where it is a deployment of `pdserve up` here."""
    from pdserve.cli import deployment

    record = None if args.target else deployment.find(args.state_dir)
    target = record.grpc if record else str(args.target)
    from pdserve.cli import text
    from pdserve.client import Client, Retry

    # What does not answer now is what is asked here; a moment is for a proxy that was only just started.
    with Client(target, timeout=args.timeout, retry=Retry(seconds=1.0)) as client:
        topology = client.topology()
    if args.json:
        told = dataclasses.asdict(topology)
        if record:
            told["processes"] = {
                name: {"pid": pid, "restarts": record.restarts[name], "metrics": record.metrics.get(name, "")}
                for name, pid in record.processes.items()
            }
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0
    print(f"proxy {target}: mode {topology.default_mode or 'unknown'}, {topology.in_flight} in flight, ", end="")
    print(f"{topology.queued} queued")
    if record:
        if record.http:
            print(f"gRPC {record.grpc}, HTTP {record.http}/v1, traces {_traces(record)}")
        else:
            print("the proxy is on another node, and so are its HTTP port and its traces")
    header = ("engine", "role", "model", "address", "state", "KV tokens free", "running", "waiting", "last beat")
    rows = [
        (
            engine.engine_id[:8],
            engine.role,
            engine.model,
            engine.address,
            f"{engine.state} ({engine.excluded_because})" if engine.excluded_because else engine.state,
            f"{engine.free_kv_tokens} of {engine.total_kv_tokens}",
            str(engine.running),
            str(engine.waiting),
            f"{engine.beat_age_seconds:.1f} s",
        )
        for engine in topology.engines
    ]
    print(text.table(header, rows, left=5) if rows else "no engine has registered")
    if record:
        lines = [
            (name, str(pid), str(record.restarts[name]), record.metrics.get(name, "-"))
            for name, pid in record.processes.items()
        ]
        print(f"\n{text.table(('process', 'pid', 'restarts', 'metrics'), lines)}")
    return 0


def _traces(record: "Deployment") -> str:
    if not record.traces:
        return "not kept here"
    return record.traces if "traces" in record.processes else "not kept any more"
