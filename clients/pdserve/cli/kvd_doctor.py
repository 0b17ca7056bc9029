"""`pdserve kvd doctor`: what really carries KV between this node and its peers, and how fast."""

import argparse
import json
from typing import TYPE_CHECKING

from pdserve.cli import options
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.api.kvd.v1 import kvd_pb2

NAMES = ("shm", "nixl", "mori", "gpu_ipc", "sim", "rdma", "xgmi", "tcp", "cma")
"""What --expect may be called: kvd's transports, and what their lanes are."""
UCX = (
    "self", "sysv", "posix", "xpmem", "knem",
    "rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "gga_mlx5", "srd",
)  # fmt: skip
"""What UCX itself calls a lane besides."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds whom to measure and what to expect."""
    parser.epilog = (
        "Bytes are read by the node that they go to: this measures the way here; the way there, the other node's "
        "doctor. Memory of GPUs is measured within the node, where kvd has a transport for it. Status 0: what would be "
        "used works, though there may be warnings. Status 1: it does not, it is not what was expected, or mori's "
        "control port is open to strangers; stderr says which."
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="--peer-address of another node's kvd; may be repeated; default: all that this kvd is linked to",
    )
    parser.add_argument(
        "--expect",
        type=_name,
        metavar="NAME",
        help="what must be used: a transport (shm, nixl, gpu_ipc, ...) or what its lanes are (rdma, xgmi, tcp, cma, "
        "...); by each peer where there is any, else within this node; for one kind of memory, host or GPU",
    )
    parser.add_argument(
        "--timeout", type=options.seconds, default=30.0, metavar="S", help="for all of it, at most 120; default 30 s"
    )


def _name(text: str) -> str:
    """A name that something may have, for argparse: no measurement would meet another."""
    if text not in (*NAMES, *UCX):
        said = f"{', '.join(NAMES)}, or by UCX's names {', '.join(UCX)}"
        raise argparse.ArgumentTypeError(f"nothing is called {text!r}: {said}")
    return text


def request(args: argparse.Namespace) -> "kvd_pb2.MeasureRequest":
    """What kvd is asked."""
    from pdserve.api.kvd.v1 import kvd_pb2

    return kvd_pb2.MeasureRequest(peers=args.peer, deadline_seconds=args.timeout)


def report(answer: "kvd_pb2.MeasureResponse", target: str, *, as_json: bool) -> str:
    """The answer, for people or programs."""
    from pdserve.cli import kvd_doctor_text, kvd_json

    if as_json:
        return json.dumps(kvd_json.plain(answer), indent=2, ensure_ascii=False)
    return kvd_doctor_text.shown(answer, target)


def judge(answer: "kvd_pb2.MeasureResponse", expected: str | None) -> None:
    """Whether all is well.

    Raises:
        ConfigError: a way does not work, strangers may reach mori, or another transport than expected is used; with
            each.
    """
    from pdserve.cli import kvd_doctor_text

    wrong = kvd_doctor_text.broken(answer)
    if expected is not None:
        wrong += kvd_doctor_text.unmet(answer.ways, expected)
    if wrong:
        raise ConfigError("; ".join(wrong))
