"""The gRPC face of the daemon: decode, call, encode."""

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd import codec
from pdserve.kvd.attachments import Member
from pdserve.kvd.node import Node
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.runtime.failpoints import Point, failpoint, passing

log = structlog.get_logger(__name__)

_MODES = {Mode.READ: common_pb2.TRANSFER_MODE_READ, Mode.WRITE: common_pb2.TRANSFER_MODE_WRITE}
_AttachContext = grpc.aio.ServicerContext[kvd_pb2.AttachRequest, kvd_pb2.AttachResponse]


class KvdService(kvd_pb2_grpc.KvdServicer):
    """Attach: one stream per participant."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Attach(
        self, request_iterator: AsyncIterator[kvd_pb2.AttachRequest], context: _AttachContext
    ) -> AsyncIterator[kvd_pb2.AttachResponse]:
        """See kvd.proto."""
        try:
            async with asyncio.timeout(self._node.config.hello_timeout):
                first = await anext(request_iterator)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidRequest("no hello") from None
        hello, pid = codec.decode_hello(first)
        member, stream, welcome = self._node.attach(hello, pid)
        # Called however the call ends, also where this generator is not closed in time.
        context.add_done_callback(lambda _: self._node.detach(member, stream))  # type: ignore[arg-type]  # not a Protocol
        reader = asyncio.create_task(self._read(member, stream, request_iterator))
        try:
            yield codec.encode_welcome(welcome)
            while (message := await member.next(stream)) is not None:
                for arriving in await passing(Point.KVD_TELL, message):
                    yield codec.encode(arriving)
        finally:
            self._node.detach(member, stream)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def close(self) -> None:
        """Ends every stream: the daemon stops."""
        for member in self._node.attachments.everybody():
            member.fail(Unavailable("kvd stops"))

    async def _read(self, member: Member, stream: int, requests: AsyncIterator[kvd_pb2.AttachRequest]) -> None:
        """Hands on what comes, in order, and ends the stream with whatever is wrong with it."""
        error: PdserveError = Unavailable("the stream has ended")
        try:
            async for request in requests:
                await failpoint(Point.KVD_HEARD)
                self._node.handle(member.engine_id, codec.decode(request))
        except PdserveError as refused:
            log.warning("attach_refused", engine_id=member.engine_id, reason=refused.reason, error=refused.message)
            error = refused
        except grpc.aio.BaseError as broken:
            log.info("attach_broken", engine_id=member.engine_id, error=str(broken))
        except Exception as defect:  # noqa: BLE001  # counted, logged, and told to the caller
            self._node.defect(defect)
            error = PdserveError(f"{type(defect).__name__}: {defect}")
        member.fail_stream(stream, error)


class OperatorService(kvd_pb2_grpc.OperatorServicer):
    """What operators ask."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Describe(self, request: kvd_pb2.DescribeRequest, context: Any) -> kvd_pb2.DescribeResponse:
        """Regions, transports and counts."""
        node = self._node
        regions = []
        for entry in node.registry:
            for rank, region in sorted(entry.regions.items()):
                counts = node.leases.counts(entry.engine_id, region.layout.num_blocks)
                regions.append(
                    kvd_pb2.Region(
                        engine_id=entry.engine_id,
                        rank=rank,
                        kind=region.kind.value,
                        bytes=region.size,
                        num_blocks=region.layout.num_blocks,
                        free=counts.free,
                        leased=counts.leased,
                        in_flight=counts.in_flight,
                        quarantined=counts.quarantined,
                    )
                )
        return kvd_pb2.DescribeResponse(
            kvd_epoch=node.epoch,
            version=importlib.metadata.version("pdserve"),
            transports=[t.capabilities.name for t in node.transports],
            regions=regions,
            transfers=self._states(),
            draining=node.transfers.draining,
            copier=node.mover.name,
        )

    def _states(self) -> dict[str, int]:
        """Open ends by state ("producer.computing", "consumer.filling", ...), and ended handles by
        outcome or reason ("ended.landed", "ended.PEER_LOST", ...)."""
        book = self._node.transfers.book
        states: dict[str, int] = {f"ended.{word}": count for word, count in book.ended.items()}
        for transfer in book.transfers.values():
            names = [f"consumer.{c.state.value}" for c in transfer.consumers.values()]
            if transfer.producer is not None:
                names.append(f"producer.{transfer.producer.state.value}")
            for name in names:
                states[name] = states.get(name, 0) + 1
        if self._node.defects:
            states["defects"] = self._node.defects
        return states

    async def ListTransfers(self, request: kvd_pb2.ListTransfersRequest, context: Any) -> kvd_pb2.ListTransfersResponse:
        """Every open transfer."""
        now = self._node.now()
        listed = []
        for transfer in self._node.transfers.book.transfers.values():
            consumers = [c for _, c in sorted(transfer.consumers.items())]
            listed.append(
                kvd_pb2.Transfer(
                    transfer_id=transfer.transfer_id,
                    mode=_MODES[transfer.mode],
                    producer_engine_id=transfer.source_engine,
                    consumer_engine_ids=[c.engine_id for c in consumers],
                    producer_state=transfer.producer.state.value if transfer.producer else "none",
                    consumer_states=[c.state.value for c in consumers],
                    age_seconds=now - transfer.created_at,
                    bytes_moved=sum(c.bytes_landed for c in consumers),
                    reason=transfer.stop.reason if transfer.stop else "",
                )
            )
        return kvd_pb2.ListTransfersResponse(transfers=listed)

    async def ListLeases(self, request: kvd_pb2.ListLeasesRequest, context: Any) -> kvd_pb2.ListLeasesResponse:
        """Every lease."""
        now = self._node.now()
        return kvd_pb2.ListLeasesResponse(
            leases=[
                kvd_pb2.Lease(
                    lease_id=str(lease.lease_id),
                    engine_id=lease.engine_id,
                    transfer_id=lease.transfer_id,
                    block_ids=lease.block_ids,
                    age_seconds=now - lease.granted_at,
                    remaining_seconds=max(0.0, lease.expires_at - now) if lease.expires_at is not None else 0.0,
                    in_flight=lease.in_flight,
                    quarantined=lease.quarantined,
                )
                for lease in self._node.leases
            ]
        )

    async def Drain(self, request: kvd_pb2.DrainRequest, context: Any) -> kvd_pb2.DrainResponse:
        """Waits until no transfer is open."""
        return kvd_pb2.DrainResponse(remaining=await self._node.drained(max(0.0, request.deadline_seconds)))
