"""`pdserve kvd`: what a node's daemon holds, for whom, since when and why; its drain; and what its links can do."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from pdserve.cli import kvd_doctor, options
from pdserve.rpc.errors import ConfigError, KvdUnavailable

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from pdserve.api.kvd.v1 import kvd_pb2_grpc

    Answer = TypeVar("Answer", bound=Message)

_GRACE = 5.0
"""Seconds that a drain's answer may come late."""
_CLEAR = "\x1b[H\x1b[J"
"""To the upper left, and clear to the end of the screen."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the questions, each with which kvd to ask."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, help_ in (
        ("describe", "the daemon, its engines, their memory, and counts since its start"),
        ("transfers", "every open transfer and what it waits for"),
        ("leases", "every lease: who holds which blocks until when"),
        ("drain", "take no new transfers and wait for the open ones; status 0 when none is left"),
        ("doctor", "measure what carries KV within this node and from its peers; status 1 where that does not work"),
    ):
        action = actions.add_parser(name, help=help_, description=help_.capitalize() + ".", allow_abbrev=False)
        where = action.add_mutually_exclusive_group()
        where.add_argument("--socket", type=Path, metavar="PATH", help="gRPC socket of a kvd; default: what runs here")
        where.add_argument(
            "--state-dir", type=Path, metavar="FOLDER", help="of the `pdserve up` or the `pdserve-kvd` to ask"
        )
        action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "drain":
            action.add_argument(
                "--deadline", type=options.seconds, default=30.0, metavar="S", help="longest wait; default 30 s"
            )
            action.add_argument("--undo", action="store_true", help="take new transfers again")
        elif name == "doctor":
            kvd_doctor.arguments(action)
        else:
            action.add_argument("--timeout", type=options.seconds, default=5.0, metavar="S", help="default 5 s")
        if name == "transfers":
            action.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
            action.add_argument(
                "--interval", type=options.seconds, default=1.0, metavar="S", help="of --watch; default 1 s"
            )


def run(args: argparse.Namespace) -> int:
    """Asks, prints, and says with the status whether anything is left where that was the question."""
    target = find(args)
    from pdserve.api.kvd.v1 import kvd_pb2_grpc
    from pdserve.rpc.channel import sync_channel

    with sync_channel(target) as channel:
        kvd = _Kvd(target, kvd_pb2_grpc.OperatorStub(channel))
        if args.action == "drain":
            return _drain(kvd, args)
        if args.action == "doctor":
            return _doctor(kvd, args)
        if args.action == "transfers" and args.watch:
            watch(lambda: _report(kvd, args, indent=None), sys.stdout, terminal=_in_place(args), interval=args.interval)
        print(_report(kvd, args, indent=2))
    return 0


def find(args: argparse.Namespace) -> str:
    """The gRPC target of the kvd that was named, or of the one that runs here.

    Raises:
        ConfigError: none was named and none runs.
    """
    if args.socket:
        return f"unix:{args.socket}"
    from pdserve.cli import deployment, plan

    try:
        return deployment.find(args.state_dir, "name a kvd with --socket PATH").kvd
    except ConfigError:
        # A kvd may run in the folder without a deployment, or before it is ready.
        alone = args.state_dir / plan.KVD_SOCKET if args.state_dir else None
        if alone is None or not alone.is_socket():
            raise
        return f"unix:{alone}"


def watch(
    report: Callable[[], str],
    out: TextIO,
    *,
    terminal: bool,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Writes a report again and again: in place on a terminal, one after the other elsewhere.

    Raises:
        PdserveError: what `report` raises; nothing else ends it but Ctrl-C.
    """
    while True:
        text = report()
        out.write(f"{_CLEAR if terminal else ''}{text}\n")
        out.flush()
        sleep(interval)


class _Kvd:
    """Calls one daemon."""

    def __init__(self, target: str, stub: "kvd_pb2_grpc.OperatorStub") -> None:
        self.target = target
        self.stub = stub

    def ask(self, method: "Callable[..., Answer]", request: "Message", timeout: float) -> "Answer":
        """One call.

        Raises:
            KvdUnavailable: nobody answers, or not in time.
            PdserveError: what kvd says.
        """
        import grpc

        from pdserve.rpc.status import to_error

        try:
            return method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._silent(error, timeout) or to_error(error) from error

    def _silent(self, error: "grpc.RpcError", timeout: float) -> KvdUnavailable | None:
        import grpc

        from pdserve.rpc.status import DETAILS_KEY

        code: Any = error  # the blocking client's error has the call's methods
        if any(key == DETAILS_KEY for key, _ in code.trailing_metadata() or ()):
            return None
        if code.code() is grpc.StatusCode.UNAVAILABLE:
            return KvdUnavailable(f"no kvd answers at {self.target}")
        if code.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return KvdUnavailable(f"the kvd at {self.target} does not answer within {timeout:g} s")
        return None


def _in_place(args: argparse.Namespace) -> bool:
    return sys.stdout.isatty() and not args.json


def _report(kvd: _Kvd, args: argparse.Namespace, indent: int | None) -> str:
    """The answer to a question, as text or JSON."""
    from pdserve.api.kvd.v1 import kvd_pb2
    from pdserve.cli import kvd_json, kvd_text

    answer: Message
    if args.action == "describe":
        answer = described = kvd.ask(kvd.stub.Describe, kvd_pb2.DescribeRequest(), args.timeout)
        text = kvd_text.describe(described, kvd.target)
    elif args.action == "transfers":
        answer = listed = kvd.ask(kvd.stub.ListTransfers, kvd_pb2.ListTransfersRequest(), args.timeout)
        text = kvd_text.transfers(listed.transfers)
    else:
        answer = held = kvd.ask(kvd.stub.ListLeases, kvd_pb2.ListLeasesRequest(), args.timeout)
        text = kvd_text.leases(held.leases)
    return json.dumps(kvd_json.plain(answer), indent=indent, ensure_ascii=False) if args.json else text


def _drain(kvd: _Kvd, args: argparse.Namespace) -> int:
    from pdserve.api.kvd.v1 import kvd_pb2
    from pdserve.cli import kvd_json, kvd_text

    request = kvd_pb2.DrainRequest(deadline_seconds=args.deadline, undo=args.undo)
    answer = kvd.ask(kvd.stub.Drain, request, (0.0 if args.undo else args.deadline) + _GRACE)
    left = kvd.ask(kvd.stub.ListTransfers, kvd_pb2.ListTransfersRequest(), _GRACE).transfers if answer.remaining else ()
    if args.json:
        open_ = [kvd_json.plain(transfer) for transfer in left]
        print(json.dumps({**kvd_json.plain(answer), "transfers": open_}, indent=2, ensure_ascii=False))
    elif args.undo:
        print(f"new transfers are taken again; {answer.remaining} are open")
    else:
        print(kvd_text.drained(answer, left))
    return 0 if args.undo or not answer.remaining else 1


def _doctor(kvd: _Kvd, args: argparse.Namespace) -> int:
    """Raises ConfigError where something does not work, or is not as expected."""
    answer = kvd.ask(kvd.stub.Measure, kvd_doctor.request(args), args.timeout + _GRACE)
    print(kvd_doctor.report(answer, kvd.target, as_json=args.json))
    kvd_doctor.judge(answer, args.expect)
    return 0
