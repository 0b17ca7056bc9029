"""One prefill service, and good requests to it."""

from dataclasses import replace
from typing import Any

from pdserve.api.common.v1 import common_pb2
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.testing import INFO, Run
from pdserve.prefill.service import NAME, PrefillService
from pdserve.prefill.session import PrefillConfig, Prefiller
from pdserve.runtime.clock import Clock
from pdserve.runtime.signing import Signer
from tests.unit.served import SIGNER, TID, Served

PEER = replace(INFO, engine_id="decode-engine")


def locator(signer: Signer = SIGNER, expires_at: float = 0.0, **identity: str) -> bytes:
    """A decode engine's locator."""
    info = replace(PEER, identity={**INFO.identity, **identity})
    return Peers(info, "unix:/kvd", signer).our_locator(expires_at)


class World(Served):
    """One prefill service."""

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(NAME)
        prefiller = Prefiller(self.engine, self.handoffs, self.peers, self.calls, Clock(), config)
        servicer = PrefillService(prefiller, self.calls, Clock())
        prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, self.server.grpc)
        self.stub = prefill_pb2_grpc.PrefillStub(self.channel)

    def ask(self, **changes: Any) -> Any:
        """A call with a good request, changed."""
        values: dict[str, Any] = {
            "request_id": "r1",
            "transfer_id": TID,
            "mode": common_pb2.TRANSFER_MODE_READ,
            "prompt_token_ids": [1, 2, 3],
            "consumers": 1,
        }
        timeout = changes.pop("timeout", 20)
        return self.stub.Prefill(prefill_pb2.PrefillRequest(**(values | changes)), timeout=timeout)


async def ready(world: World, call: Any) -> tuple[Run, Any]:
    """Lets the engine answer, and reads `ready`."""
    run = await world.engine.next_run()
    run.answer([65])
    message = await call.read()
    assert message.WhichOneof("event") == "ready"
    return run, message.ready
