"""One consumer's side of a hand-over: its end, and what to do when that is bad."""

import asyncio

import structlog

from pdserve.decode.recompute import RecomputeSlots, worth_recomputing
from pdserve.engine.ends import error_of
from pdserve.engine.hosting.handoffs import Watch
from pdserve.engine.hosting.stamps import Cut, Progress
from pdserve.kvd.client.messages import Facts
from pdserve.rpc.errors import DeadlinePassed, PdserveError

log = structlog.get_logger(__name__)


class Taking:
    """Follows one answer's hand-over."""

    def __init__(self, watch: Watch, slots: RecomputeSlots | None, timeout: float) -> None:
        """`slots` None: the prompt may not be computed here. `timeout`: longest wait for the end, seconds."""
        self._watch = watch
        self._slots = slots
        self._timeout = timeout
        self.first_token = asyncio.Event()
        """To be set when the answer has its first token: recomputing is then over."""

    async def guard(self) -> None:
        """Returns when the hand-over is done, or was made up for by recomputing.

        Raises:
            PdserveError: it failed and the prompt may not be computed here: kvd's reason.
            DeadlinePassed: kvd never ended it.
        """
        end = await self._watch.end(self._timeout)
        if end.outcome.good:
            return
        error = error_of(end)
        if self._slots is None or not worth_recomputing(error) or not await self._slots.hold(self.first_token):
            raise error
        log.warning("recomputed", transfer_id=end.transfer_id, consumer=end.consumer, reason=end.reason)

    @property
    def error(self) -> PdserveError | None:
        """kvd's reason where the hand-over has failed."""
        end = self._watch.result
        return None if end is None or end.outcome.good else error_of(end)

    def tell(self, progress: Progress) -> None:
        """How far the hand-over has come, as far as kvd has said."""
        end = self._watch.result
        if end is None:
            return
        if end.facts != Facts():
            progress.facts = end.facts
        if end.facts.accepted_ns:
            progress.passed(Cut.DECODE_BLOCKS_RESERVED, end.facts.accepted_ns)
        if end.outcome.good:
            progress.passed(Cut.KV_LANDED, end.facts.landed_ns)
            return
        progress.unseen.discard(Cut.KV_LANDED)
        if self._slots is None:  # nobody computes the prompt instead
            progress.unseen.discard(Cut.DECODE_SCHEDULED)

    async def facts(self, timeout: float) -> Facts | None:
        """What landed; None where nothing did, or where kvd has not said so in `timeout` seconds."""
        try:
            end = await self._watch.end(timeout)
        except DeadlinePassed:
            log.warning("end_missing", waited=timeout)
            return None
        return end.facts if end.outcome.good else None
