"""`pdserve-prefill`: hosts one engine that computes prompts for others."""

import sys

from pdserve.api.prefill.v1 import prefill_pb2_grpc
from pdserve.engine.hosting import process
from pdserve.engine.hosting.program import Parts, Program
from pdserve.prefill.service import NAME, PrefillService
from pdserve.prefill.session import PrefillConfig, Prefiller
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.telemetry import catalogue


def add(parts: Parts, config: PrefillConfig) -> None:
    """Computes prompts and hands their KV over to decode services."""
    if parts.handoffs is None:
        raise ConfigError("a prefill service needs --kvd-socket")
    prefiller = Prefiller(parts.engine, parts.handoffs, parts.peers, parts.calls, parts.clock, config)
    servicer = PrefillService(prefiller, parts.calls, parts.clock)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, parts.server.grpc)


PROGRAM = Program("pdserve-prefill", NAME, ("prefill",), PrefillConfig, add, catalogue.ENGINE)


def main() -> int:
    """Entry point."""
    return process.main(PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
