"""Run by path: a process that looks like a pdserve service from outside. Health over gRPC, and a topology."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2


def topology(engines: list[str]) -> serving_pb2.GetTopologyResponse:
    """All of them ready."""
    return serving_pb2.GetTopologyResponse(
        engines=[
            serving_pb2.EngineStatus(
                engine_id=f"id-{address}", role=common_pb2.ENGINE_ROLE_BOTH, address=address, state="ready"
            )
            for address in engines
        ]
    )


def handler(service: str, method: str, answer: bytes) -> grpc.GenericRpcHandler:
    """A method that always answers the same."""
    unary = grpc.unary_unary_rpc_method_handler(
        lambda request, context: answer, request_deserializer=bytes, response_serializer=bytes
    )
    return grpc.method_handlers_generic_handler(service, {method: unary})


def has_lived(mark: Path) -> bool:
    """Whether a process with this mark was here before; now one was."""
    lived = mark.exists()
    mark.touch()
    return lived


def leave_a_child(record: Path) -> None:
    """Starts a process that outlives us; says so where that of our predecessor does."""
    if record.exists():
        status = Path(f"/proc/{record.read_text()}/status")  # of a zombie, where nobody reaps it
        if status.exists() and "\nState:\tZ" not in status.read_text():
            print("the old child lives", flush=True)
    child = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    record.write_text(str(child.pid))


def start_a_helper(told: Path) -> None:
    """Starts a process that outlives us, and that makes a file when it gets SIGTERM."""
    subprocess.Popen(["/bin/sh", "-c", f"trap 'touch {told}' TERM; touch {told}.begun; while :; do sleep 0.1; done"])
    while not Path(f"{told}.begun").exists():
        time.sleep(0.01)


def main() -> int:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--engines", nargs="*", default=[])
    parser.add_argument("--die", type=int, default=None, help="end at once with this status")
    parser.add_argument("--says", default="something is wrong", help="what it says then")
    parser.add_argument("--die-again", type=Path, help="end at once with status 3, but for the first time")
    parser.add_argument("--serve-once", type=Path, help="serve the first time only")
    parser.add_argument("--child", type=Path, help="start a process that outlives us; the file gets its pid")
    parser.add_argument("--helper", type=Path, help="start a process that makes this file when it gets SIGTERM")
    parser.add_argument("--stubborn", action="store_true", help="take no notice of SIGTERM")
    parser.add_argument("--drains", action="store_true", help="drain until a second SIGTERM")
    parser.add_argument("--environ", default="", help="say the value of this variable")
    parser.add_argument("--record", default="", help="file that gets our name when we drain")
    parser.add_argument("--name", default="")
    args = parser.parse_args()
    print(f"fake {args.name} begins", flush=True)
    if args.die is not None:
        print(args.says, flush=True)
        return int(args.die)
    if args.die_again and has_lived(args.die_again):
        print("not again", flush=True)
        return 3
    if args.child:
        leave_a_child(args.child)
    if args.helper:
        start_a_helper(args.helper)
    if args.environ:
        print(f"{args.environ} is {os.environ.get(args.environ)}", flush=True)
    stop, told = threading.Event(), 1 + args.drains

    def term(*_: object) -> None:
        nonlocal told
        told -= 1
        if not told:
            stop.set()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.stubborn else term)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    known = topology(args.engines).SerializeToString()
    server.add_generic_rpc_handlers(
        [
            handler("grpc.health.v1.Health", "Check", b"\x08\x01"),
            handler("pdserve.api.serving.v1.Inference", "GetTopology", known),
        ]
    )
    if not (args.serve_once and has_lived(args.serve_once)):
        server.add_insecure_port(args.listen)
    server.start()
    stop.wait(60)
    if args.record:
        with open(args.record, "a") as file:
            file.write(f"{args.name}\n")
    server.stop(0).wait(5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
