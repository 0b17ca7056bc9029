"""One decode service, and good requests to it."""

from dataclasses import replace
from typing import Any

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.decode.service import NAME, DecodeService
from pdserve.decode.session import DecodeConfig, Decoder
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.testing import INFO
from pdserve.kvd.client.messages import Facts
from pdserve.runtime.clock import Clock
from pdserve.runtime.signing import Signer
from tests.unit.served import SIGNER, TID, Served

PROMPT = [1, 2, 3]
READ, WRITE = common_pb2.TRANSFER_MODE_READ, common_pb2.TRANSFER_MODE_WRITE
FAIL, RECOMPUTE = common_pb2.FAILURE_POLICY_FAIL, common_pb2.FAILURE_POLICY_RECOMPUTE
FACTS = Facts(
    kv_bytes=100,
    blocks=2,
    layers=4,
    ranks=1,
    copy_ns=7,
    transport="shm",
    lanes="memcpy",
    first_post_ns=20,
    landed_ns=30,
    overlapped_bytes=50,
    offered_ns=10,
    accepted_ns=15,
    last_byte_ns=25,
)


def producer(signer: Signer = SIGNER, **identity: str) -> Peers:
    """A prefill engine that signs."""
    info = replace(INFO, engine_id="prefill-engine", identity={**INFO.identity, **identity})
    return Peers(info, "unix:/kvd", signer)


def ticket(
    signer: Signer = SIGNER, transfer_id: bytes = TID, tokens: int = 3, expires_at: float = 0.0, **identity: str
) -> bytes:
    """What prefill's `ready` carried."""
    return producer(signer, **identity).our_ticket(transfer_id, tokens, 1, expires_at)


def source(**changes: Any) -> decode_pb2.KvSource:
    """A good READ source, changed."""
    values: dict[str, Any] = {"transfer_id": TID, "mode": READ}
    if "peer_locator" not in changes:
        values["ticket"] = ticket()
    return decode_pb2.KvSource(**{name: value for name, value in (values | changes).items() if value is not None})


class World(Served):
    """One decode service."""

    def __init__(self, config: DecodeConfig, kvd: bool = True) -> None:
        super().__init__(NAME)
        handoffs = self.handoffs if kvd else None
        decoder = Decoder(self.engine, handoffs, self.peers, self.calls, Clock(), config)
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(decoder, self.calls, Clock()), self.server.grpc)
        self.stub = decode_pb2_grpc.DecodeStub(self.channel)

    def ask(self, **changes: Any) -> Any:
        """A call with a good request, changed."""
        values: dict[str, Any] = {"request_id": "r1", "prompt_token_ids": PROMPT, "source": source()}
        timeout = changes.pop("timeout", 20)
        return self.stub.Decode(decode_pb2.DecodeRequest(**(values | changes)), timeout=timeout)


def taken(stamps: common_pb2.Stamps) -> dict[str, int]:
    """Stamps by name."""
    return {common_pb2.CutPoint.Name(s.point).removeprefix("CUT_POINT_"): s.monotonic_ns for s in stamps.stamps}
