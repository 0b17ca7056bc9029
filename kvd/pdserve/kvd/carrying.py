"""Carries out what the core wants done: tells, copies, closes, unmaps, and writes the log. One call for each effect,
in the core's order; what takes time becomes a task of its owner."""

import logging
from collections.abc import Callable, Coroutine, Sequence

import structlog

from pdserve.kvd.attachments import Attachments, Member
from pdserve.kvd.client.messages import End, Outcome
from pdserve.kvd.copier import Copier
from pdserve.kvd.counts import Counts
from pdserve.kvd.effects import CancelOp, Effect, Note, Post, TearDown, Tell, Unmap
from pdserve.kvd.peers.cards import Cards
from pdserve.kvd.peers.desk import Desk
from pdserve.kvd.regions import Regions
from pdserve.kvd.sessions import Sessions
from pdserve.kvd.transport.port import MappedRegion

log = structlog.get_logger(__name__)

Spawn = Callable[[Coroutine[object, object, None]], None]


class Carrying:
    """See the module. `spawn` owns tasks; `changed` is told when memory has been given back."""

    def __init__(
        self,
        attachments: Attachments,
        desk: Desk,
        copier: Copier,
        sessions: Sessions,
        regions: Regions,
        cards: Cards,
        counts: Counts,
        spawn: Spawn,
        changed: Callable[[], None],
    ) -> None:
        self._attachments = attachments
        self._desk = desk
        self._copier = copier
        self._sessions = sessions
        self._regions = regions
        self._cards = cards
        self._counts = counts
        self._spawn = spawn
        self._changed = changed
        self._verbose = bool(log.is_enabled_for(logging.DEBUG))

    def carry_out(self, effect: Effect, now: float) -> list[Member]:
        """Does it, or has another node's daemon do it; participants that do not read what they are told."""
        self._counts.effect(effect)
        if isinstance(effect, Tell) and isinstance(effect.message, End) and not effect.again:
            self._log_end(effect.engine_id, effect.message)
        match self._desk.carry_out(effect, now):
            case Tell(engine_id, message):
                return self._attachments.tell(engine_id, message, now)
            case Post() as post:
                self._copier.post(post)
            case CancelOp(op_id):
                self._copier.cancel(op_id)
            case TearDown(op_ids):
                for pair in self._copier.pairs(op_ids):
                    log.error("session_torn_down", src=str(pair[0]), dst=str(pair[1]))
                    self._spawn(self._sessions.close(pair))
            case Unmap(engine_id):
                self._spawn(self._unmap(engine_id, self._regions.withdraw(engine_id)))
            case Note() as note:
                self._log_note(note)
            case None:
                pass  # another node's daemon does it
        return []

    async def _unmap(self, engine_id: str, regions: Sequence[MappedRegion]) -> None:
        await self._sessions.close_engine(engine_id)
        await self._cards.forget(regions)
        await self._regions.unmap(engine_id, regions)
        self._changed()
        log.info("engine_unmapped", engine_id=engine_id, regions=len(regions))

    def _log_note(self, note: Note) -> None:
        moved = note.event.endswith("_moved")
        if moved and not self._verbose:  # six a transfer, which nobody would see
            return
        level = log.debug if moved else log.warning
        level(note.event, transfer_id=note.transfer_id.hex(), **dict(note.facts))

    def _log_end(self, engine_id: str, end: End) -> None:
        if end.outcome is Outcome.RELEASED and not self._verbose:
            return  # its last consumer's LANDED has said it
        level = log.debug if end.outcome is Outcome.RELEASED else log.info
        level(
            "transfer_end",
            engine_id=engine_id,
            handle=end.handle,
            transfer_id=end.transfer_id.hex(),
            end="producer" if end.producer else f"consumer {end.consumer}",
            outcome=end.outcome.value,
            reason=end.reason,
            bytes=end.facts.kv_bytes,
            transport=end.facts.transport,
            lanes=end.facts.lanes,
        )
