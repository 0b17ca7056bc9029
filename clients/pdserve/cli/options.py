"""Command-line options that several sub-commands share."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.client import Client, PdserveError

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
CALL = (*SAMPLING, "model", "mode", "route", "on_failure", "timeout")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds --target and --state-dir: which proxy to talk to."""
    parser.add_argument("--target", metavar="HOST:PORT", help="gRPC address of a proxy; default: what runs here")
    parser.add_argument("--state-dir", type=Path, metavar="FOLDER", help="of the `pdserve up` to talk to")


def add_call(parser: argparse.ArgumentParser) -> None:
    """Adds what a generating call takes."""
    parser.add_argument("--model", default="", help="default: the deployment's only model")
    parser.add_argument(
        "--max-tokens", type=count, default=256, metavar="N", help="most tokens to generate; default 256"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, metavar="S")
    parser.add_argument("--mode", choices=("read", "write"), help="how the KV cache is handed over")
    parser.add_argument(
        "--route", choices=("split", "split_or_colocated", "colocated"), help="which engines may answer"
    )
    parser.add_argument("--on-failure", choices=("fail", "recompute"), help="when a hand-over fails")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="seconds; default 600")
    parser.add_argument(
        "--retry",
        type=patience,
        metavar="S",
        help="seconds in which it is asked again where nobody can answer; 0: not at all; default 60",
    )


def client(args: argparse.Namespace, *, quiet: bool = False) -> "Client":
    """A client of the proxy that was named, or of the one that runs here. Unless `quiet` it says on stderr why it asks
    again, each reason once.

    Raises:
        ConfigError: none was named and none runs.
    """
    where = target(args)
    from pdserve.client import Client, Retry

    said: set[str] = set()

    def again(error: "PdserveError", _: float) -> None:
        if not quiet and error.reason not in said:
            said.add(error.reason)
            print(f"pdserve: {error.message} ({error.reason}); asking again", file=sys.stderr)

    return Client(where, retry=Retry() if args.retry is None else Retry(seconds=args.retry), on_retry=again)


def call_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of a call; what was not given is left out."""
    return {name: getattr(args, name) for name in CALL if getattr(args, name) is not None}


def target(args: argparse.Namespace) -> str:
    """The gRPC address that was named, or that of the deployment that runs here.

    Raises:
        ConfigError: none was named and none runs.
    """
    if args.target:
        return str(args.target)
    from pdserve.cli import deployment

    return deployment.find(args.state_dir).grpc


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def times(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def port(text: str) -> int:
    """A TCP port, for argparse; 0: any."""
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"{value} is not a TCP port: 0 to 65535")
    return value


def patience(text: str) -> float:
    """A number of seconds of at least 0, for argparse."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value
