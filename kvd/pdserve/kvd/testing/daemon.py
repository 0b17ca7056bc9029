"""A daemon inside the test's process."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pdserve.kvd.config import KvdConfig, SimConfig, TransportName
from pdserve.kvd.limits import Limits
from pdserve.kvd.node import Node
from pdserve.kvd.peers.config import NO_PEERS, PeerConfig
from pdserve.kvd.server import serving
from pdserve.kvd.transport.make import MakeTransports, make_transports
from pdserve.kvd.transport.sim import FaultPlan, SimTransport
from pdserve.runtime.config import ClusterKey
from pdserve.runtime.signing import Signer

SHORT: Final = Limits(lease=0.3, accept=0.3, transfer=0.3, fence=0.3, park=0.3, tie=0.1)
"""Deadlines for tests that wait for them."""


@dataclass(frozen=True, slots=True)
class RunningKvd:
    """A daemon that serves."""

    node: Node
    config: KvdConfig

    @property
    def socket(self) -> str:
        """The path of its gRPC socket."""
        return str(self.config.grpc_socket)

    @property
    def signer(self) -> Signer:
        """Signs as the cluster does."""
        return Signer(self.config.cluster_key.secret)

    @property
    def faults(self) -> FaultPlan:
        """The faults of its simulated link; raises LookupError without one."""
        for transport in self.node.transports:
            if isinstance(transport, SimTransport):
                return transport.faults
        raise LookupError("this kvd has no simulated link")


@contextlib.asynccontextmanager
async def running_kvd(
    state_dir: Path | None = None,
    *,
    limits: Limits | None = None,
    transport: TransportName | str = TransportName.SHM,
    sim: SimConfig | None = None,
    grace: float = 2.0,
    cluster_key: bytes | None = None,
    transports: MakeTransports = make_transports,
    peer: PeerConfig = NO_PEERS,
    **deadlines: float,
) -> AsyncIterator[RunningKvd]:
    """Serves while the block runs; `deadlines` replace single fields of `limits`.

    Without `state_dir`, in a temporary folder with a short path. On the way out its books are
    checked: a defect of kvd fails the test.
    """
    with contextlib.ExitStack() as stack:
        folder = state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd")))
        config = KvdConfig(
            folder,
            transport=TransportName(transport),
            sim=sim or SimConfig(),
            limits=replace(limits or Limits(), **deadlines),  # type: ignore[arg-type]  # floats by name
            grace=grace,
            peer=peer,
        )
        if cluster_key is not None:
            config = replace(config, cluster_key=ClusterKey(cluster_key, given=True))
        async with serving(config, transports=transports) as node:
            yield RunningKvd(node, config)
        node.transfers.check()
        if node.defects:
            raise AssertionError("kvd found a defect of its own; the log has it")
