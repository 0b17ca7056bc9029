"""The two services at their own API, past the proxy: a test plays the proxy's part, well or badly."""

from collections.abc import Sequence
from typing import Any

import grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tests.sim.fleet import Fleet
from tests.sim.hosted import Service

DEADLINE_S = 50.0
_MODES = {"read": common_pb2.TRANSFER_MODE_READ, "write": common_pb2.TRANSFER_MODE_WRITE}


class Legs:
    """Opens legs at the services of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def prefill(
        self, service: Service, transfer_id: bytes, prompt: Sequence[int], mode: str | int, **more: Any
    ) -> Any:
        """The call of a prefill leg; `more` goes into the request, a number of `mode` as it is."""
        card = self._fleet.card
        fields: dict[str, Any] = {
            "request_id": "r",
            "transfer_id": transfer_id,
            "mode": _MODES[mode] if isinstance(mode, str) else mode,
            "prompt_token_ids": prompt,
            "consumers": 1,
            "peer_locator": card(self._fleet.decodes[0]).locator,
        }
        stub = prefill_pb2_grpc.PrefillStub(await self._fleet.channel(card(service).address))
        return stub.Prefill(prefill_pb2.PrefillRequest(**(fields | more)), timeout=DEADLINE_S)

    async def decode(
        self,
        service: Service,
        transfer_id: bytes,
        prompt: Sequence[int],
        *,
        ticket: bytes = b"",
        locator: bytes = b"",
        max_tokens: int = 4,
        on_failure: common_pb2.FailurePolicy.ValueType = common_pb2.FAILURE_POLICY_FAIL,
    ) -> Any:
        """The call of a decode leg for greedy tokens: a READ with a ticket, else a WRITE."""
        card = self._fleet.card
        source = decode_pb2.KvSource(transfer_id=transfer_id, mode=_MODES["read" if ticket else "write"])
        if ticket:
            source.ticket = ticket
        else:
            source.peer_locator = locator or card(self._fleet.prefills[0]).locator
        request = decode_pb2.DecodeRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
            source=source,
            on_failure=on_failure,
        )
        stub = decode_pb2_grpc.DecodeStub(await self._fleet.channel(card(service).address))
        return stub.Decode(request, timeout=DEADLINE_S)

    @staticmethod
    async def tokens(call: Any) -> list[int]:
        """Reads a decode leg to its end."""
        found: list[int] = []
        while (message := await call.read()) is not grpc.aio.EOF:
            found.extend(message.tokens.token_ids)
        return found

    @staticmethod
    async def released(call: Any) -> Any:
        """Reads a prefill leg to its end; what it said last."""
        last = None
        while (message := await call.read()) is not grpc.aio.EOF:
            last = message.released
        return last
