"""What kvd and the proxy say at one moment, and what of it is not as in a whole fleet that has nothing to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.client import Topology
from tests.matrix import settings

_ON_ITS_WAY_S: Final = 0.02
"""Of a beat, from what it says to the proxy."""


@dataclass(frozen=True, slots=True)
class Look:
    """Answers to questions that were asked together."""

    asked_at: float
    """On the loop's clock."""
    names: Mapping[str, str]
    """Of the members by the engine ids of their present lives."""
    topology: Topology
    described: kvd_pb2.DescribeResponse
    transfers: Sequence[kvd_pb2.Transfer]
    leases: Sequence[kvd_pb2.Lease]

    def held(self, since: float | None) -> list[str]:
        """What anyone holds, in words. With `since`, a moment of the loop's clock, engines are believed only what they
        said after it."""
        return [*self._at_kvd(), *self._at_proxy(since)]

    def lacks(self) -> list[str]:
        """What keeps the fleet from serving with all its members; in words."""
        listed = {engine.engine_id: engine.excluded_because for engine in self.topology.engines}
        found = [f"{name} is not listed" for key, name in self.names.items() if key not in listed]
        found += [f"{self.names.get(key, key)}: {why}" for key, why in listed.items() if why or key not in self.names]
        regions = sorted(region.engine_id for region in self.described.regions)
        if regions != sorted([*self.names] * settings.SIM.ranks):
            found.append("kvd has not the memory of all engines, or that of ended ones")
        return found

    def _at_kvd(self) -> list[str]:
        found = [
            f"kvd: transfer {t.transfer_id.hex()[:8]} {t.producer_state} {list(t.consumer_states)}: {t.waits_for}"
            for t in self.transfers
        ]
        found += [f"kvd: lease {lease.lease_id} of {len(lease.block_ids)} blocks" for lease in self.leases]
        found += [
            f"kvd: {region.num_blocks - region.free} blocks of {self.names.get(region.engine_id, 'an ended engine')}"
            for region in self.described.regions
            if region.free != region.num_blocks
        ]
        return found + ([f"kvd: {self.described.defects} defects"] if self.described.defects else [])

    def _at_proxy(self, since: float | None) -> list[str]:
        ours = [engine for engine in self.topology.engines if engine.engine_id in self.names]
        found = [
            f"{self.names[engine.engine_id]} has not said yet what it holds"
            for engine in ours
            # The proxy was asked later than at `asked_at`: the beat came when this says, or after.
            if since and self.asked_at - engine.beat_age_seconds < since + _ON_ITS_WAY_S
        ]
        found += [
            f"{self.names[engine.engine_id]}: {engine.total_kv_tokens - engine.free_kv_tokens} KV tokens"
            for engine in ours
            if engine.free_kv_tokens != engine.total_kv_tokens
        ]
        if self.topology.queued or self.topology.in_flight:
            found.append(f"proxy: {self.topology.queued} queued, {self.topology.in_flight} in flight")
        return found
