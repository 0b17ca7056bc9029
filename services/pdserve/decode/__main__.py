"""`pdserve-decode`: hosts one engine that answers, from KV that others computed or by itself."""

import sys

from pdserve.api.decode.v1 import decode_pb2_grpc
from pdserve.decode.metrics import readings
from pdserve.decode.service import NAME, DecodeService
from pdserve.decode.session import DecodeConfig, Decoder
from pdserve.engine.hosting import process
from pdserve.engine.hosting.program import Parts, Program
from pdserve.runtime.telemetry import catalogue


def add(parts: Parts, config: DecodeConfig) -> None:
    """Answers prompts: takes their KV over from prefill services, or computes it (role both)."""
    decoder = Decoder(parts.engine, parts.handoffs, parts.peers, parts.calls, parts.clock, config)
    parts.metrics.read(lambda: readings(decoder, parts.role))
    servicer = DecodeService(decoder, parts.calls, parts.clock)
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, parts.server.grpc)


PROGRAM = Program("pdserve-decode", NAME, ("decode", "both"), DecodeConfig, add, catalogue.DECODE)


def main() -> int:
    """Entry point."""
    return process.main(PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
