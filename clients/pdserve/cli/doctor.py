"""`pdserve doctor`: whether this host can run a deployment, before one is started, and what to do where it cannot."""

import argparse
import dataclasses
import json
from pathlib import Path

from pdserve.cli import doctor_checks, doctor_facts, options
from pdserve.cli.doctor_checks import Finding, Level, Plan
from pdserve.rpc.errors import ConfigError

_PORTS = (50050, 8000, 16686)
"""gRPC, HTTP and traces, as `pdserve up` and compose.yaml have them."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the host is meant for."""
    parser.epilog = (
        "Status 0: nothing is in the way, though there may be warnings. Status 1: something is; stderr names it."
    )
    parser.add_argument("--for", dest="device", choices=("cpu", "cuda", "rocm"), default="cpu", help="default cpu")
    parser.add_argument("--rdma", action="store_true", help="KV is to travel over RDMA between hosts")
    parser.add_argument("--docker", action="store_true", help="to be started with docker compose, not with pdserve up")
    parser.add_argument(
        "--ports",
        type=options.port,
        nargs="*",
        default=list(_PORTS),
        metavar="P",
        help="that must be free; default 50050 8000 16686",
    )
    parser.add_argument("--state-dir", type=Path, metavar="FOLDER", help="as for `pdserve up`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each check; 0 where nothing fails.

    Raises:
        ConfigError: something fails; its message names each.
    """
    from pdserve.cli import deployment

    plan = Plan(device=args.device, rdma=args.rdma, docker=args.docker)
    state_dir = (args.state_dir or deployment.default_dir()).absolute()
    facts = doctor_facts.gather(Path("/"), state_dir, args.ports)
    found = doctor_checks.check(facts, plan)
    if args.json:
        checks = [{**dataclasses.asdict(finding), "level": finding.level.value} for finding in found]
        told = {"plan": dataclasses.asdict(plan), "checks": checks}
        print(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        print("\n".join(line for finding in found for line in lines(finding)))
    failed = [finding.name for finding in found if finding.level is Level.FAIL]
    if failed:
        raise ConfigError(f"this host is not ready: {', '.join(failed)}")
    return 0


def lines(finding: Finding) -> list[str]:
    """As people read it: what was found and, below it, what to do."""
    head = f"{finding.level.value:<4}  {finding.name:<11}  {finding.said}"
    return [head, *([f"{'':<19}{finding.todo}"] if finding.todo else [])]
