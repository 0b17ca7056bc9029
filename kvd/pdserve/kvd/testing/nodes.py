"""Two daemons with a wire before each: two nodes in the test's process, on simulated links between their memories."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from pdserve.kvd.config import KvdConfig
from pdserve.kvd.limits import Limits
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.testing.daemon import RunningKvd, running_kvd
from pdserve.kvd.testing.wire import Wire
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.make import MakeTransports
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.sim import FaultPlan, SimTransport
from pdserve.runtime.testing import Gate


@dataclass(slots=True)
class RunningNode:
    """One node: a daemon, what it is reached through, and what its copies pass."""

    kvd: RunningKvd
    wire: Wire
    copies: Gate
    faults: FaultPlan

    @property
    def free(self) -> bool:
        """Whether nothing is held or open here."""
        node = self.kvd.node
        return not len(node.leases) and not node.transfers.open and not node.transfers.book.ops


@contextlib.asynccontextmanager
async def running_node(
    *,
    limits: Limits | None = None,
    grace: float = 2.0,
    peer: PeerConfig | None = None,
    cluster_key: bytes | None = None,
    wire: Wire | None = None,
    transports: MakeTransports | None = None,
    **deadlines: float,
) -> AsyncIterator[RunningNode]:
    """A node on loopback. `peer`: its settings but for the address; `deadlines` replace single fields of `limits`;
    `transports`: other ones than a simulated link, for which `copies` and `faults` do nothing."""
    async with contextlib.AsyncExitStack() as stack:
        cable = wire if wire is not None else await stack.enter_async_context(Wire())
        copies, faults = Gate(), FaultPlan()
        copies.open()

        def simulated(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
            return (SimTransport(arena, 1e9, faults=faults, sleep=copies.sleep),)

        settings = replace(peer or PeerConfig(listen="127.0.0.1:0"), address=cable.address)
        kvd = await stack.enter_async_context(
            running_kvd(
                limits=replace(limits or Limits(), **deadlines),  # type: ignore[arg-type]  # floats by name
                grace=grace,
                transports=transports or simulated,
                peer=settings,
                cluster_key=cluster_key,
            )
        )
        cable.target = kvd.node.network.port
        stack.callback(copies.open)
        yield RunningNode(kvd, cable, copies, faults)
