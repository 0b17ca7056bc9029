"""What operators see and drain, and one daemon to a folder."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd.client import Accept, Offer, Outcome
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.node import Node
from pdserve.kvd.server import serving
from pdserve.kvd.testing import FakeEngine, RunningKvd, running_kvd
from pdserve.kvd.types import Mode
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import ConfigError
from tests.contract.kvd.doors.works import works


async def test_operators_see_what_is_held(kvd: RunningKvd) -> None:
    """Describe, ListTransfers and ListLeases show an open transfer; the four block states add up."""
    async with FakeEngine(kvd, seed=1) as p, aio_channel(f"unix:{kvd.socket}") as channel:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1, 2, 3), 48, Mode.READ))
        await kvd.node.until(lambda: len(kvd.node.leases) == 1, 5.0)
        stub = kvd_pb2_grpc.OperatorStub(channel)
        seen = await stub.Describe(kvd_pb2.DescribeRequest())
        (region,) = seen.regions
        assert (region.engine_id, region.kind, region.num_blocks) == (p.engine_id, "host", 64)
        assert (region.free, region.leased, region.in_flight, region.quarantined) == (61, 3, 0, 0)
        assert list(seen.transports) == ["shm"]
        assert seen.transfers["producer.complete"] == 1
        (transfer,) = (await stub.ListTransfers(kvd_pb2.ListTransfersRequest())).transfers
        assert (transfer.transfer_id, transfer.producer_engine_id) == (tid, p.engine_id)
        assert (transfer.producer_state, list(transfer.consumer_states)) == ("complete", [])
        (lease,) = (await stub.ListLeases(kvd_pb2.ListLeasesRequest())).leases
        assert (lease.engine_id, list(lease.block_ids), lease.quarantined) == (p.engine_id, [1, 2, 3], False)
        assert 0 < lease.remaining_seconds <= 30


async def test_drain_waits_for_what_is_open_and_takes_nothing_new(kvd: RunningKvd) -> None:
    """A deadline that passes counts what is left; what is open may still land; new transfers hear that kvd drains."""
    async with FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d, aio_channel(f"unix:{kvd.socket}") as channel:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
        await kvd.node.until(lambda: len(kvd.node.leases) == 1, 5.0)
        stub = kvd_pb2_grpc.OperatorStub(channel)
        assert (await stub.Drain(kvd_pb2.DrainRequest(deadline_seconds=0.01))).remaining == 1
        draining = asyncio.create_task(_drain(stub))
        p.scheduler.send(Offer("new", os.urandom(16), 0, (2,), 16, Mode.READ))
        refused = await p.end_of("new")
        assert (refused.reason, "drains" in refused.detail) == ("KVD_UNAVAILABLE", True)
        assert not draining.done()
        d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
        assert await asyncio.wait_for(draining, 5) == 0
        assert (await d.end_of("d")).outcome is Outcome.LANDED


async def _drain(stub: "kvd_pb2_grpc.OperatorAsyncStub") -> int:
    return (await stub.Drain(kvd_pb2.DrainRequest(deadline_seconds=10))).remaining


async def test_two_daemons_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second is refused and the first goes on; a folder left by a dead one is taken over."""
    async with running_kvd(tmp_path) as kvd:
        with pytest.raises(ConfigError, match="another kvd"):
            async with serving(KvdConfig(tmp_path)):
                pass
        assert await works(kvd)
    for name in ("kvd.sock", "memory.sock", "notices.sock"):
        (tmp_path / name).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(tmp_path / name))
    async with running_kvd(tmp_path) as kvd:
        assert await works(kvd)


async def test_a_node_that_is_closed_twice_is_closed(tmp_path: Path) -> None:
    """Closing is safe twice, also of one that never started."""
    node = Node(KvdConfig(tmp_path))
    await node.aclose()
    await node.aclose()
