"""Which engines there are, what they are, and where the memory of their ranks lies. Pure.

An engine is known from its first hello or region until its end; its id is its epoch and is never
taken again.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pdserve.kvd.types import PROTOCOL, Identity, Layout, MemoryKind, identity_difference
from pdserve.rpc.errors import IncompatibleEngines, InvalidRequest, StaleEpoch

_ENDED_KEPT: Final = 65_536


@dataclass(frozen=True, slots=True)
class Region:
    """One rank's memory, as registered."""

    size: int
    kind: MemoryKind
    layout: Layout


@dataclass(slots=True, eq=False)
class EngineEntry:
    """One engine of this node, or a guest: one of another node that hands over to or from this one."""

    engine_id: str
    identity: Identity | None = None
    """None until its first hello."""
    ranks: int = 0
    """0 until its first hello."""
    regions: dict[int, Region] = field(default_factory=dict)
    ended: bool = False
    """Over, but operations may still touch its memory."""
    home: str = ""
    """Of a guest: the epoch of the daemon that it lives with. Empty: it is this node's."""

    @property
    def mapped(self) -> bool:
        """Whether every rank's memory is here."""
        return 0 < self.ranks == len(self.regions)

    @property
    def layouts(self) -> list[Layout]:
        """Of every rank; only once all of them are here."""
        return [self.regions[rank].layout for rank in range(self.ranks)]

    @property
    def num_blocks(self) -> int:
        """Blocks that every registered rank has; 0 without regions."""
        return min((r.layout.num_blocks for r in self.regions.values()), default=0)


class Registry:
    """The engines of the node, and its guests."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineEntry] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[EngineEntry]:
        """The node's own."""
        return iter([entry for entry in self._engines.values() if not entry.home])

    def guests(self) -> list[EngineEntry]:
        """Engines of other nodes."""
        return [entry for entry in self._engines.values() if entry.home]

    def get(self, engine_id: str) -> EngineEntry | None:
        """The engine while it lives, or while its memory is in use."""
        return self._engines.get(engine_id)

    def live(self, engine_id: str) -> EngineEntry:
        """A running engine.

        Raises:
            StaleEpoch: it has ended or was never here.
        """
        entry = self._engines.get(engine_id)
        if entry is None or entry.ended:
            what = "has ended" if entry is not None or engine_id in self._ended else "is not known here"
            raise StaleEpoch(f"engine {engine_id} {what}", engine_id=engine_id)
        return entry

    def hello(self, engine_id: str, ranks: int, protocol: int, identity: Identity) -> EngineEntry:
        """A participant of an engine says what the engine is.

        Raises:
            IncompatibleEngines: another protocol.
            StaleEpoch: the engine has ended.
            InvalidRequest: it contradicts what another participant or a region said.
        """
        if protocol != PROTOCOL:
            raise IncompatibleEngines(
                f"connector protocol {protocol}; this kvd speaks {PROTOCOL}", protocol=f"{protocol} != {PROTOCOL}"
            )
        if not engine_id:
            raise InvalidRequest("hello without engine_id")
        if ranks < 1:
            raise InvalidRequest(f"hello with {ranks} ranks")
        entry = self._entry(engine_id)
        if entry.identity is not None:
            difference = identity_difference(entry.identity, identity)
            if entry.ranks != ranks:
                difference["ranks"] = f"{entry.ranks} != {ranks}"
            if difference:
                raise InvalidRequest(f"engine {engine_id} said before that it is something else", **difference)
        for rank, region in entry.regions.items():
            self._check_region(engine_id, rank, region, ranks, identity)
        entry.identity, entry.ranks = dict(identity), ranks
        self._engines[engine_id] = entry
        return entry

    def add_region(self, engine_id: str, rank: int, region: Region) -> EngineEntry:
        """A rank's memory is here.

        Raises:
            StaleEpoch: the engine has ended.
            InvalidRequest: a second region of a rank, or one that cannot be what it says.
        """
        entry = self._entry(engine_id)
        if not engine_id or rank < 0:
            raise InvalidRequest(f"rank {rank} of engine {engine_id!r}")
        if rank in entry.regions:
            raise InvalidRequest(f"rank {rank} of engine {engine_id} has registered its memory before")
        self._check_layout(region)
        if entry.identity is not None:
            self._check_region(engine_id, rank, region, entry.ranks, entry.identity)
        entry.regions[rank] = region
        self._engines[engine_id] = entry
        return entry

    def guest(
        self, engine_id: str, ranks: int, identity: Identity, regions: Mapping[int, Region], home: str
    ) -> EngineEntry:
        """Another node's daemon says what an engine of its own is; again where it has more regions now.

        Raises:
            StaleEpoch: the engine has ended.
            InvalidRequest: it is an engine of this node or of a third one, or it contradicts what was said before.
        """
        entry = self._engines.get(engine_id)
        if entry is not None and entry.home != home:
            raise InvalidRequest(f"engine {engine_id} lives elsewhere")
        if entry is None:
            entry = self._entry(engine_id)
            entry.home = home
        if not engine_id or ranks < 1:
            raise InvalidRequest(f"engine {engine_id!r} of {ranks} ranks")
        if entry.identity is not None and (entry.identity != dict(identity) or entry.ranks != ranks):
            raise InvalidRequest(f"engine {engine_id} said before that it is something else")
        for rank, region in regions.items():
            if (known := entry.regions.get(rank)) is not None and known != region:
                raise InvalidRequest(f"rank {rank} of engine {engine_id} had other memory before")
            self._check_layout(region)
            self._check_region(engine_id, rank, region, ranks, identity)
        entry.identity, entry.ranks = dict(identity), ranks
        entry.regions.update(regions)
        self._engines[engine_id] = entry
        return entry

    def drop(self, engine_id: str) -> None:
        """Forgets a guest whose daemon cannot be reached; it may be introduced again."""
        self._engines.pop(engine_id, None)

    def end(self, engine_id: str) -> bool:
        """Marks an engine as over; whether it was running until now."""
        entry = self._engines.get(engine_id)
        if entry is None or entry.ended:
            return False
        entry.ended = True
        return True

    def forget(self, engine_id: str) -> None:
        """Drops an ended engine whose memory nothing touches; its id stays refused."""
        self._engines.pop(engine_id, None)
        self._ended[engine_id] = None
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    def _entry(self, engine_id: str) -> EngineEntry:
        entry = self._engines.get(engine_id)
        if engine_id in self._ended or (entry is not None and entry.ended):
            raise StaleEpoch(f"engine {engine_id} has ended; a restarted engine takes a new id", engine_id=engine_id)
        if entry is not None and entry.home:
            raise InvalidRequest(f"engine {engine_id} lives on another node")
        return entry or EngineEntry(engine_id)

    @staticmethod
    def _check_layout(region: Region) -> None:
        try:
            region.layout.check(region.size)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        if region.layout.num_blocks < 1 or region.layout.block_size < 1 or not region.layout.layers:
            raise InvalidRequest("a region needs at least one layer and one block of one token")

    @staticmethod
    def _check_region(engine_id: str, rank: int, region: Region, ranks: int, identity: Identity) -> None:
        if not 0 <= rank < ranks:
            raise InvalidRequest(f"rank {rank} of engine {engine_id}, which has {ranks} ranks")
        said, has = identity.get("block_size"), str(region.layout.block_size)
        if said is not None and said != has:
            raise InvalidRequest(
                f"rank {rank} of engine {engine_id}: its memory has blocks of {has} tokens, its identity says {said}"
            )
