"""What operators ask of the daemon: decode, call, encode."""

import importlib.metadata
from typing import Any

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd.attachments import Member
from pdserve.kvd.client.messages import Participant
from pdserve.kvd.effects import Stop
from pdserve.kvd.ends import Transfer
from pdserve.kvd.explain import bytes_wanted, stopped, waits_for
from pdserve.kvd.leases import Lease
from pdserve.kvd.node import Node
from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.relayed import RelayedEnd
from pdserve.kvd.peers.relayed import waits_for as relayed_waits_for
from pdserve.kvd.probing.codec import encode
from pdserve.kvd.registry import EngineEntry
from pdserve.kvd.transport.rank_host import TakesHosts
from pdserve.kvd.types import Mode, RegionKey
from pdserve.rpc.errors import InvalidRequest
from pdserve.runtime.config import split_address

_MODES = {Mode.READ: common_pb2.TRANSFER_MODE_READ, Mode.WRITE: common_pb2.TRANSFER_MODE_WRITE}
_MEASURE_S = 30.0
"""For a measurement that says nothing else."""
_MEASURE_MOST_S = 120.0
_PARTICIPANTS = {
    Participant.HOST: kvd_pb2.PARTICIPANT_HOST,
    Participant.SCHEDULER: kvd_pb2.PARTICIPANT_SCHEDULER,
    Participant.WORKER: kvd_pb2.PARTICIPANT_WORKER,
}


class OperatorService(kvd_pb2_grpc.OperatorServicer):
    """See kvd.proto."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Describe(self, request: kvd_pb2.DescribeRequest, context: Any) -> kvd_pb2.DescribeResponse:
        """The daemon, its engines and regions, and counts."""
        node, now = self._node, self._node.now()
        book = node.transfers.book
        fences = book.fences
        return kvd_pb2.DescribeResponse(
            kvd_epoch=node.epoch,
            version=importlib.metadata.version("pdserve"),
            transports=[t.capabilities.name for t in node.transports],
            copier=node.mover.name,
            uptime_seconds=now - node.started_at,
            engines=[self._engine(entry, now) for entry in node.registry],
            regions=[region for entry in node.registry for region in self._regions(entry)],
            transfers=self._states(),
            fences=kvd_pb2.Fences(
                count=fences.count,
                waited=fences.waited,
                longest_seconds=fences.longest,
                total_seconds=fences.total,
                torn_down=fences.torn_down,
                bound_seconds=book.limits.fence,
            ),
            expiries=book.expired,
            defects=node.defects,
            draining=node.transfers.draining,
            peers=[self._peer(link) for link in node.desk.links],
            peer_address=node.desk.address,
            peers_lost=node.desk.lost,
            carried=[
                kvd_pb2.Carried(
                    transport=transport, lanes=lanes, copies=one.copies, bytes=one.nbytes, copy_seconds=one.ns / 1e9
                )
                for (transport, lanes), one in sorted(node.counts.carried.items())
            ],
        )

    async def ListTransfers(self, request: kvd_pb2.ListTransfersRequest, context: Any) -> kvd_pb2.ListTransfersResponse:
        """Every open transfer, and every consumer's end here of one whose book another node's daemon keeps."""
        now = self._node.now()
        open_ = [self._transfer(transfer, now) for transfer in self._node.transfers.book.transfers.values()]
        relayed = [self._relayed(end, now) for end in self._node.transfers.relay]
        return kvd_pb2.ListTransfersResponse(transfers=open_ + relayed)

    async def ListLeases(self, request: kvd_pb2.ListLeasesRequest, context: Any) -> kvd_pb2.ListLeasesResponse:
        """Every lease."""
        now = self._node.now()
        return kvd_pb2.ListLeasesResponse(leases=[_lease(lease, now) for lease in self._node.leases])

    async def Drain(self, request: kvd_pb2.DrainRequest, context: Any) -> kvd_pb2.DrainResponse:
        """Waits until no transfer is open; or undoes a drain."""
        transfers = self._node.transfers
        if request.undo:
            self._node.undrain()
            return kvd_pb2.DrainResponse(remaining=transfers.open, draining=transfers.draining)
        remaining = await self._node.drained(max(0.0, request.deadline_seconds))
        return kvd_pb2.DrainResponse(remaining=remaining, draining=transfers.draining)

    async def Measure(self, request: kvd_pb2.MeasureRequest, context: Any) -> kvd_pb2.MeasureResponse:
        """Each transport within this node and from each peer."""
        seconds = request.deadline_seconds or _MEASURE_S
        if not 0 < seconds <= _MEASURE_MOST_S:
            raise InvalidRequest(f"a measurement of {seconds:g} s; {_MEASURE_MOST_S:g} s at most")
        if request.peers and not self._node.config.peer.on:
            raise InvalidRequest("this kvd has no --peer-listen")
        peers = list(dict.fromkeys(request.peers)) or [link.address for link in self._node.desk.links if link.address]
        for peer in peers:
            split_address(peer)
        return encode(await self._node.survey.measure(peers, seconds))

    def _engine(self, entry: EngineEntry, now: float) -> kvd_pb2.Engine:
        members = sorted(self._node.attachments.of(entry.engine_id), key=lambda m: (m.kind.value, m.rank))
        return kvd_pb2.Engine(
            engine_id=entry.engine_id,
            ranks=entry.ranks,
            age_seconds=max((now - member.attached_at for member in members), default=0.0),
            participants=[_participant(member, now) for member in members],
            ended=entry.ended,
        )

    def _peer(self, link: Link) -> kvd_pb2.Peer:
        said = link.peer
        relay, guests = self._node.transfers.relay, self._node.desk.guests
        return kvd_pb2.Peer(
            address=link.address,
            node=said.node if said is not None else "",
            kvd_epoch=link.epoch,
            version=said.version if said is not None else "",
            state=link.state.value,
            engines=len(guests.of(link)),
            operations=guests.carried_by(link),
            relayed=sum(end.link is link for end in relay),
            unacknowledged=link.waiting,
            resumed=link.resumed,
            clock_ahead_seconds=link.clock.unix_ns / 1e9,
            clock_uncertainty_seconds=link.clock.uncertainty_ns / 1e9,
        )

    def _regions(self, entry: EngineEntry) -> list[kvd_pb2.Region]:
        regions = []
        for rank, region in sorted(entry.regions.items()):
            counts = self._node.leases.counts(entry.engine_id, region.layout.num_blocks)
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
                    registered_by=self._registered_by(RegionKey(entry.engine_id, rank)),
                )
            )
        return regions

    def _registered_by(self, key: RegionKey) -> str:
        words = (t.registered_by(key) for t in self._node.transports if isinstance(t, TakesHosts))
        return next(filter(None, words), "")

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
        if relayed := len(self._node.transfers.relay):
            states["consumer.relayed"] = relayed
        if self._node.defects:
            states["defects"] = self._node.defects
        return states

    def _transfer(self, transfer: Transfer, now: float) -> kvd_pb2.Transfer:
        book = self._node.transfers.book
        producer, stop = transfer.producer, stopped(transfer)
        consumers = [c for _, c in sorted(transfer.consumers.items())]
        return kvd_pb2.Transfer(
            transfer_id=transfer.transfer_id,
            mode=_MODES[transfer.mode],
            producer_engine_id=transfer.source_engine,
            producer_state=producer.state.value if producer else "none",
            producer_handle=producer.handle if producer else "",
            consumer_engine_ids=[c.engine_id for c in consumers],
            consumer_states=[c.state.value for c in consumers],
            consumer_handles=[c.handle for c in consumers],
            age_seconds=now - transfer.created_at,
            bytes_moved=sum(c.bytes_landed for c in consumers),
            bytes_wanted=bytes_wanted(transfer, self._node.registry),
            operations=sum(len(c.ops) for c in consumers),
            waits_for=waits_for(transfer, book.timers.get, now),
            reason=stop.reason if stop else "",
            detail=stop.detail if stop else "",
            transport=next((c.transport for c in consumers if c.transport), ""),
            lanes=next((c.lanes for c in consumers if c.lanes), ""),
        )

    def _relayed(self, end: RelayedEnd, now: float) -> kvd_pb2.Transfer:
        entry = self._node.registry.get(end.engine_id)
        per_block = sum(region.layout.block_bytes for region in entry.regions.values()) if entry else 0
        stop = end.last if isinstance(end.last, Stop) else None
        return kvd_pb2.Transfer(
            transfer_id=end.transfer_id,
            mode=_MODES[end.mode],
            producer_engine_id=end.source,
            producer_state="elsewhere",
            consumer_engine_ids=[end.engine_id],
            consumer_states=["relayed" if end.last is None else "fencing"],
            consumer_handles=[end.handle],
            age_seconds=now - end.created_at,
            bytes_moved=end.bytes_fetched,
            bytes_wanted=len(end.lease.block_ids) * per_block,
            operations=len(end.ops),
            waits_for=relayed_waits_for(end, now),
            reason=stop.reason if stop else "",
            detail=stop.detail if stop else "",
            transport=end.transport,
            lanes=end.lanes,
        )


def _participant(member: Member, now: float) -> kvd_pb2.EngineParticipant:
    return kvd_pb2.EngineParticipant(
        participant=_PARTICIPANTS[member.kind],
        rank=member.rank,
        pid=member.pid,
        age_seconds=now - member.attached_at,
        attached=member.connected,
        lost_seconds=0.0 if member.lost_at is None else now - member.lost_at,
    )


def _lease(lease: Lease, now: float) -> kvd_pb2.Lease:
    expires_at = None if lease.quarantined else lease.expires_at
    return kvd_pb2.Lease(
        lease_id=str(lease.lease_id),
        engine_id=lease.engine_id,
        transfer_id=lease.transfer_id,
        block_ids=lease.block_ids,
        age_seconds=now - lease.granted_at,
        remaining_seconds=0.0 if expires_at is None else max(0.0, expires_at - now),
        expires=expires_at is not None,
        in_flight=lease.in_flight,
        quarantined=lease.quarantined,
        quarantined_seconds=0.0 if lease.quarantined_at is None else now - lease.quarantined_at,
    )
