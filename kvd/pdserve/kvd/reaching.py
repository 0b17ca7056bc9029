"""What is done with all transports that reach other nodes."""

from collections.abc import Mapping, Sequence
from typing import cast

import structlog

from pdserve.kvd.transport.port import MappedRegion, Reaching, Transport
from pdserve.rpc.errors import PdserveError

log = structlog.get_logger(__name__)


def reaching(transports: Sequence[Transport]) -> Mapping[str, Reaching]:
    """Those that reach other nodes, by name."""
    return {t.capabilities.name: cast("Reaching", t) for t in transports if t.capabilities.other_node}


async def forget(transports: Mapping[str, Reaching], region: MappedRegion) -> None:
    """Takes a region's registrations back; it is unmapped after, whatever a transport says."""
    for name, transport in transports.items():
        try:
            await transport.forget(region)
        except PdserveError as error:
            log.error("card_not_taken_back", region=str(region.key), transport=name, error=error.message)
