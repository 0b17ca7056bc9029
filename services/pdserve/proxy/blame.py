"""Which engine of an attempt was at fault, as far as its error tells. Pure."""

from pdserve.proxy.types import EngineCard
from pdserve.rpc.errors import (
    ConsumerFailed,
    PdserveError,
    PeerLost,
    ProducerFailed,
    TicketRefused,
    TransferExpired,
    TransferFailed,
)


def at_fault(
    error: PdserveError, prefill_error: PdserveError | None, prefill: EngineCard | None, decode: EngineCard
) -> str:
    """The id of the engine that the next attempt should avoid; empty where neither is at fault.

    `error` ended the attempt, `prefill_error` is what prefill's own leg has said; `prefill` None: decode
    worked alone, or has what it wanted of prefill. Each leg calls the other one its peer.
    """
    if prefill is None:
        return decode.engine_id
    if error is prefill_error:
        at_decode = isinstance(error, PeerLost | ConsumerFailed)
    elif isinstance(error, TransferFailed):
        if isinstance(error, ConsumerFailed):
            at_decode = True
        elif isinstance(error, ProducerFailed | PeerLost | TransferExpired):
            at_decode = False
        else:
            return ""
    else:
        at_decode = not isinstance(error, TicketRefused)
    return decode.engine_id if at_decode else prefill.engine_id
