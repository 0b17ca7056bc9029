"""The life of one decode request: check, reserve, take over the prompt's KV, stream n answers.

    check -> n engine requests -> kvd fills each one's blocks -> Tokens ... -> Finished
      |            |                     |                          |
      +------------+---------------------+--------------------------+--> any trouble: all n are
            aborted at the engine and the transfer is cancelled at kvd, so that prefill frees at once

A hand-over that fails is made up for by computing the prompt here where the request allows it and few
enough others do so; else the request ends with the reason that kvd gave.
"""

import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from pdserve.decode.answer import Answer
from pdserve.decode.fan import Fan
from pdserve.decode.messages import Ask, Finished, Tokens
from pdserve.decode.recompute import RecomputeSlots
from pdserve.decode.taking import Taking
from pdserve.engine.checks import check_prompt
from pdserve.engine.hosting.handoffs import Handoffs
from pdserve.engine.hosting.held import Held
from pdserve.engine.hosting.intake import OneShot, check_request_id
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.stamps import Cut, Progress
from pdserve.engine.port import Consume, Engine, Output, Request
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import ConsumerFailed, InvalidRequest, KvdUnavailable, PdserveError, TransferFailed
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

_ALONE = frozenset({Cut.DECODE_SCHEDULED})
_HANDED_OVER = _ALONE | {Cut.DECODE_BLOCKS_RESERVED, Cut.KV_LANDED}
"""What happens in the engine and in kvd, who tell it later than it is."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Deadlines and policies of decode requests."""

    recompute: bool = False
    """Compute the prompt here when a hand-over fails and the request does not say what to do."""
    recomputing: int = 2
    """Most prompts computed here at once after failed hand-overs: more would stall every stream."""
    transfer_seconds: float = 600.0
    """Longest wait for kvd to end a transfer, seconds; kvd's own deadlines come first."""
    settle_seconds: float = 2.0
    """Longest wait, after an answer, for kvd's word on how its blocks came, seconds."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if self.recomputing < 0 or min(self.transfer_seconds, self.settle_seconds) <= 0:
            raise ValueError("deadlines must be above 0, and recomputing at least 0")


class Decoder:
    """Runs decode requests on one engine."""

    def __init__(
        self,
        engine: Engine,
        handoffs: Handoffs | None,
        peers: Peers,
        calls: Calls,
        clock: Clock,
        config: DecodeConfig,
    ) -> None:
        """`handoffs` None: this service has no kvd and takes no source."""
        self._engine = engine
        self._handoffs = handoffs
        self._peers = peers
        self._calls = calls
        self._clock = clock
        self._config = config
        self.slots = RecomputeSlots(config.recomputing)
        self.recomputes = 0
        """Answers whose prompts were computed here after their hand-overs had failed."""
        self._transfers = OneShot()
        self._serial = itertools.count()

    async def run(
        self, transfer_id: bytes | None, read: Callable[[], Ask], progress: Progress
    ) -> AsyncGenerator[Tokens | Finished, None]:
        """Yields Tokens, then Finished. Closing it at any point aborts the answers and the transfer.

        `transfer_id` is that of the source, None without one. `read` decodes the request; it is called
        here because a request that cannot be read must release its producer, too. `progress` is kept up to
        date, for what is said of a failure.

        Raises:
            InvalidRequest, TicketRefused, IncompatibleEngines: before the engine is touched.
            TransferUsed: the transfer id is another request's, which goes on untouched.
            KvdUnavailable: a source, and no kvd.
            TransferFailed: the hand-over failed and recomputing was not allowed.
        """
        told = log.bind() if transfer_id is None else log.bind(transfer_id=transfer_id)
        takings: list[Taking] = []
        try:
            with contextlib.ExitStack() as stack:
                held = None if transfer_id is None else self._hold(stack, transfer_id)
                self._calls.check_open()
                ask = read()
                told = told.bind(request_id=ask.request_id)
                self._check(ask)
                if held is not None:
                    takings += [self._taking(held, ask, index) for index in range(ask.answers)]
                await failpoint(Point.DECODE_RECEIVED)
                answer = Answer(ask, takings, self._clock, progress)
                stack.callback(self._count, answer)
                progress.unseen |= _HANDED_OVER if takings else _ALONE
                async with Fan(self._engine, self._requests(ask)) as fan:
                    for taking in takings:
                        fan.beside(taking.guard())
                    async for index, output in _explained(fan, takings):
                        answer.heard(output)
                        await failpoint(Point.DECODE_TEXT)
                        event = await answer.event(index, output)
                        if event is not None:
                            await failpoint(Point.DECODE_TOKEN)
                            yield event
                finished = await answer.finished(self._config.settle_seconds)
                told.info(
                    "decode_ended",
                    completion_tokens=finished.completion_tokens,
                    recomputed_tokens=finished.recomputed_tokens,
                    kv_bytes=finished.facts.kv_bytes if finished.facts else 0,
                )
                yield finished
        except PdserveError as error:
            if (failed := _in_question(takings)) is not None:
                failed.tell(progress)
            told.warning("decode_failed", reason=error.reason, detail=error.message)
            raise

    def _count(self, answer: Answer) -> None:
        self.recomputes += answer.recomputes

    def _hold(self, stack: contextlib.ExitStack, transfer_id: bytes) -> Held:
        stack.enter_context(self._transfers.claim(transfer_id))
        if self._handoffs is None:
            raise KvdUnavailable("this service runs without kvd and takes no hand-over")
        return stack.enter_context(Held(self._handoffs, transfer_id, ConsumerFailed))

    def _check(self, ask: Ask) -> None:
        check_request_id(ask.request_id)
        check_prompt(self._engine.info, ask.prompt, ask.sampling.max_tokens or 1)
        source = ask.source
        if source is None:
            return
        if source.mode is Mode.READ:
            if not source.ticket:
                raise InvalidRequest("a READ needs the ticket that prefill gave")
            self._peers.check_ticket(source.ticket, source.transfer_id, len(ask.prompt), self._clock.unix())
        else:
            if not source.peer_locator:
                raise InvalidRequest("a WRITE needs the prefill engine's locator")
            self._peers.check_locator(source.peer_locator, self._clock.unix())

    def _may_recompute(self, ask: Ask) -> bool:
        return self._config.recompute if ask.recompute is None else ask.recompute

    def _taking(self, held: Held, ask: Ask, index: int) -> Taking:
        slots = self.slots if self._may_recompute(ask) else None
        return Taking(held.watch(index), slots, self._config.transfer_seconds)

    def _requests(self, ask: Ask) -> list[Request]:
        name = f"{ask.request_id or 'decode'}-{next(self._serial)}"
        return [self._request(ask, name, index) for index in range(ask.answers)]

    def _request(self, ask: Ask, name: str, index: int) -> Request:
        sampling = ask.sampling
        if sampling.seed is not None:
            # Equal seeds would give n equal answers. The sum wraps, as a seed is a signed 64-bit number.
            sampling = replace(sampling, seed=(sampling.seed + index + 2**63) % 2**64 - 2**63)
        kv = None
        if ask.source is not None:
            kv = Consume(
                ask.source.transfer_id,
                ask.source.mode,
                consumer=index,
                ticket=ask.source.ticket,
                peer_locator=ask.source.peer_locator,
                recompute=self._may_recompute(ask),
            )
        return Request(f"{name}-{index}", ask.prompt, sampling, kv)


async def _explained(fan: Fan, takings: Sequence[Taking]) -> AsyncGenerator[tuple[int, Output], None]:
    """The fan's outputs; where the engine says only that a hand-over failed, kvd's reason is raised."""
    try:
        async for event in fan.outputs():
            yield event
    except TransferFailed as error:
        known = next((taking.error for taking in takings if taking.error is not None), None)
        if known is None:
            raise
        raise known from error


def _in_question(takings: Sequence[Taking]) -> Taking | None:
    """The hand-over that a failed request is about: the one that failed, or the first."""
    return next((taking for taking in takings if taking.error is not None), takings[0] if takings else None)
