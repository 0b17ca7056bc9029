"""The life of one prefill request: compute, offer, hold until every consumer has what it needs.

check -> engine computes -> Ready -> (kvd moves the blocks) -> Released
  |            |              |
  +------------+--------------+--> any trouble: the transfer is cancelled at kvd, the engine's
                                   request aborted; nothing is held afterwards
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

import structlog

from pdserve.engine.checks import check_prompt
from pdserve.engine.ends import error_of, words
from pdserve.engine.hosting.handoffs import Handoffs, Watch
from pdserve.engine.hosting.held import Held
from pdserve.engine.hosting.intake import OneShot, check_request_id
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.stamps import Cut, Progress, Stamps
from pdserve.engine.port import Engine, Output, Produce, Request, Sampling
from pdserve.kvd.client.messages import Facts
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import DeadlinePassed, InvalidRequest, PdserveError, ProducerFailed
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import Point, failpoint
from pdserve.runtime.race import unless

log = structlog.get_logger(__name__)

LATE_CAUSE = 0.5
"""Seconds that an engine which offers too little waits for kvd's word on why."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Deadlines of prefill requests."""

    ticket_seconds: float = 30.0
    """Life of a ticket, seconds; kvd's accept deadline lies within it."""
    compute_seconds: float = 600.0
    """Longest wait for the engine to compute one prompt, seconds."""
    release_seconds: float = 120.0
    """Longest wait for kvd to end a transfer after `ready`, seconds; kvd's own deadlines come first."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if min(self.ticket_seconds, self.compute_seconds, self.release_seconds) <= 0:
            raise ValueError("deadlines must be above 0")


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to compute for a transfer."""

    request_id: str
    transfer_id: bytes
    mode: Mode
    prompt: tuple[int, ...]
    sampling: Sampling
    peer_locator: bytes
    """Signed; READ may go without."""
    consumers: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The prompt is computed and its blocks are on offer."""

    ticket: bytes
    first_token_id: int
    cached_tokens: int
    stamps: Stamps


@dataclass(frozen=True, slots=True)
class Released:
    """Every consumer has what it needs; the blocks are free."""

    facts: Facts


def first_token_only(sampling: Sampling) -> Sampling:
    """What of a request's parameters may shape prefill's run: it always ends by length after one token.

    Whether that token ends the answer is decided by decode, which owns the real parameters.
    """
    return replace(sampling, max_tokens=1, min_tokens=0, stop=(), stop_token_ids=(), ignore_eos=True, logprobs=None)


class Prefiller:
    """Runs prefill requests on one engine."""

    def __init__(
        self, engine: Engine, handoffs: Handoffs, peers: Peers, calls: Calls, clock: Clock, config: PrefillConfig
    ) -> None:
        self._engine = engine
        self._handoffs = handoffs
        self._peers = peers
        self._calls = calls
        self._clock = clock
        self._config = config
        self._transfers = OneShot()
        self._serial = itertools.count()

    async def run(
        self, transfer_id: bytes, read: Callable[[], Ask], progress: Progress
    ) -> AsyncGenerator[Ready | Released, None]:
        """Yields Ready, then Released. Closing it at any point gives the transfer up.

        `read` decodes the request. It is called here because a request that cannot be read must be told
        to the consumer, too. `progress` is kept up to date, for what is said of a failure.

        Raises:
            InvalidRequest, TicketRefused, IncompatibleEngines: before the engine is touched.
            TransferUsed: the transfer id is another request's, which goes on untouched.
            TransferFailed: the hand-over ended otherwise than released, for the reason that kvd gave.
            DeadlinePassed: the engine took too long.
        """
        told = log.bind(transfer_id=transfer_id)
        try:
            with self._transfers.claim(transfer_id), Held(self._handoffs, transfer_id, ProducerFailed) as held:
                self._calls.check_open()
                ask = read()
                told = told.bind(request_id=ask.request_id)
                self._check(ask)
                watch = held.watch(None)
                await failpoint(Point.PREFILL_RECEIVED)
                output = await self._compute(ask, watch, progress)
                await failpoint(Point.PREFILL_READY)
                yield self._ready(ask, output, dict(progress.stamps))
                end = await watch.end(self._config.release_seconds)
                told.info("prefill_ended", **words(end))
                if not end.outcome.good:
                    raise error_of(end)
                await failpoint(Point.PREFILL_RELEASED)
                yield Released(end.facts)
        except PdserveError as error:
            told.warning("prefill_failed", reason=error.reason, detail=error.message)
            raise

    def _check(self, ask: Ask) -> None:
        check_request_id(ask.request_id)
        if ask.consumers < 1:
            raise InvalidRequest("a transfer needs at least one consumer")
        check_prompt(self._engine.info, ask.prompt)
        if ask.peer_locator:
            self._peers.check_locator(ask.peer_locator, self._clock.unix())
        elif ask.mode is Mode.WRITE:
            raise InvalidRequest("a WRITE needs the decode engine's locator")

    async def _compute(self, ask: Ask, watch: Watch, progress: Progress) -> Output:
        """The engine's last output, with the first token; ends early with a transfer that ends badly."""
        request = Request(
            request_id=f"{ask.request_id or 'prefill'}-{next(self._serial)}",
            prompt=ask.prompt,
            sampling=first_token_only(ask.sampling),
            kv=Produce(ask.transfer_id, ask.mode, ask.consumers, ask.peer_locator),
        )
        progress.unseen.add(Cut.PREFILL_SCHEDULED)
        try:
            async with asyncio.timeout(self._config.compute_seconds):
                output = await unless(self._last_output(request, progress), self._bad_end(watch))
        except TimeoutError as error:
            raise DeadlinePassed(f"no answer from the engine in {self._config.compute_seconds:g} s") from error
        if not output.token_ids or output.offered_tokens != len(ask.prompt):
            # The engine's own word of a lost kvd may come sooner than ours: then that is the reason.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATE_CAUSE):
                    await self._bad_end(watch)
            raise ProducerFailed(
                f"the engine offers {output.offered_tokens} of {len(ask.prompt)} prompt tokens"
                f" and sampled {len(output.token_ids)} tokens"
            )
        return output

    async def _last_output(self, request: Request, progress: Progress) -> Output:
        tokens: tuple[int, ...] = ()
        last = Output()
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for last in outputs:
                tokens += last.token_ids
                progress.passed(Cut.PREFILL_SCHEDULED, last.times.scheduled_ns)
                if last.token_ids:
                    progress.passed(Cut.PREFILL_FORWARD_END, last.times.first_token_ns)
        return replace(last, token_ids=tokens)

    async def _bad_end(self, watch: Watch) -> None:
        # RELEASED may overtake the engine's last output in WRITE: that is no trouble.
        end = await watch.end(self._config.compute_seconds)
        if not end.outcome.good:
            raise error_of(end)

    def _ready(self, ask: Ask, output: Output, stamps: Stamps) -> Ready:
        expires_at = self._clock.unix() + self._config.ticket_seconds
        ticket = self._peers.our_ticket(ask.transfer_id, output.offered_tokens, output.offered_blocks, expires_at)
        return Ready(ticket, output.token_ids[0], output.cached_tokens, stamps)
