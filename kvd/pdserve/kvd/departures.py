"""Engines and participants that are gone: what ends with them here and on other nodes."""

from collections.abc import Callable

import structlog

from pdserve.kvd.attachments import Attachments, Member
from pdserve.kvd.peers.desk import Desk
from pdserve.kvd.registry import Registry
from pdserve.kvd.transfers import Transfers

log = structlog.get_logger(__name__)


class Departures:
    """Tells the core and the other daemons. `settle` carries out what comes of it."""

    def __init__(
        self,
        registry: Registry,
        transfers: Transfers,
        desk: Desk,
        attachments: Attachments,
        grace: float,
        settle: Callable[[], None],
    ) -> None:
        """`grace`: seconds that a participant may be without a stream."""
        self._registry = registry
        self._transfers = transfers
        self._desk = desk
        self._attachments = attachments
        self._grace = grace
        self._settle = settle

    def over(self, engine_id: str, detail: str, now: float) -> None:
        """An engine's epoch is over, and all that it had; the caller settles."""
        self._transfers.engine_ended(engine_id, detail, now)
        self._desk.engine_gone(engine_id, detail, now, over=True)

    def ended(self, engine_id: str, detail: str, now: float) -> None:
        """The same for one whose streams have nothing more to say."""
        log.warning("engine_ended", engine_id=engine_id, detail=detail)
        self.over(engine_id, detail, now)
        self._settle()
        self._attachments.forget(engine_id)

    def grace_over(self, member: Member, now: float) -> None:
        """A participant has not come back: its engine's transfers end, and the engine itself where nothing is left."""
        entry = self._registry.get(member.engine_id)
        detail = f"its {member.kind.value} {member.rank} has had no stream for {self._grace} s"
        log.warning("grace_over", engine_id=member.engine_id, detail=detail)
        alone = not any(other.connected for other in self._attachments.of(member.engine_id))
        if entry is not None and not entry.regions and alone:
            self.ended(member.engine_id, detail, now)
        else:
            self._transfers.engine_lost(member.engine_id, detail, now)
            self._desk.engine_gone(member.engine_id, detail, now, over=False)
