"""The scheduler's half of the connector: who holds, takes or gives which blocks, and since when.

Pure but for the link's `send`, which never blocks. One instance per engine, called by one thread.

    producer   allocated -> [begin] -> step: chunks ... -> finished -> offer            -> end -> sent
                                     \\-> preempted: retract, attempt + 1 -/ \\-> retract(final) -> end -> sent
    consumer   matched -> allocated -> accept -> end -> received (and failed) -> finished
                                           \\-> finished (aborted): cancel -> end -> received

What the engine may be told, and when (telling it more kills vLLM's core):
- `sent` once, for a producer whose `finished` answered True: its blocks may be freed;
- `received` once, for a consumer whose `allocated` had external tokens; also in `failed` where the
  bytes are not all there. An aborted consumer's blocks are the engine's again only then.
Every other end is swallowed: of a producer that still computes, of a consumer that lacked nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pdserve.engine.handoff import params as handoff_params
from pdserve.engine.handoff.link import MonotonicNs, SchedulerLink
from pdserve.engine.handoff.plan import Fence, ScheduledChunk, StepPlan
from pdserve.engine.port import Consume, Produce
from pdserve.kvd.client.messages import Accept, Begin, Cancel, End, Offer, Request, Retract
from pdserve.kvd.notices import Chunk
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import ConsumerFailed, ProducerFailed

__all__ = ["Fence", "MonotonicNs", "ScheduledChunk", "SchedulerHandoff", "SchedulerLink", "StepPlan"]


@dataclass(slots=True)
class _Producer:
    prompt_tokens: int
    attempt: int = 0
    announced: int = 0
    """Leading prompt blocks told to kvd in this attempt."""
    last_chunk_ns: int = 0
    """When the last chunk was put into a step's plan."""
    told: bool = False
    """kvd knows the handle and owes an end."""
    ended: bool = False
    released: bool = False
    """Ended well, which before the offer means that no consumer lacked anything."""
    held: bool = False
    """The engine keeps the blocks until `sent`."""
    finished: bool = False


@dataclass(slots=True)
class _Consumer:
    loading: bool
    """The engine waits for `received`."""
    ended: bool = False
    finished: bool = False


class SchedulerHandoff:
    """See the module. `params` are those that `params.decode` gave; None: takes no part."""

    def __init__(
        self,
        link: SchedulerLink,
        block_size: int,
        clock: MonotonicNs,
        on_end: Callable[[End], None] | None = None,
    ) -> None:
        """`on_end` hears every end that is taken from the link, once."""
        self._link = link
        self._block_size = block_size
        self._clock = clock
        self._on_end = on_end
        self._step = 0
        self._producers: dict[str, _Producer] = {}
        self._consumers: dict[str, _Consumer] = {}
        self._announcing: set[str] = set()
        self._outbox: list[Begin | Accept] = []
        """Of this round: `step` takes lost blocks back before it says who has them now."""
        self.ignored_ends = 0
        """Ends of handles that are not known (any more)."""

    @property
    def announcing(self) -> AbstractSet[str]:
        """Handles whose chunks `step` wants to see; others may be left out. Empty when idle."""
        return self._announcing

    @property
    def idle(self) -> bool:
        """No request takes part in a hand-over; `step` would do nothing."""
        return not (self._producers or self._consumers)

    def pending(self) -> int:
        """Handles that wait for their end."""
        producers = sum(p.told and not p.ended for p in self._producers.values())
        return producers + sum(not c.ended for c in self._consumers.values())

    def matched(
        self, handle: str, params: Produce | Consume | None, prompt_tokens: int, local_tokens: int
    ) -> tuple[int, bool]:
        """(prompt tokens that will come from the peer, whether asynchronously).

        No side effect; may be asked any number of times, also after a preemption or a failed
        hand-over: a transfer is taken once, later the prompt is computed here.
        """
        if not isinstance(params, Consume) or handle in self._consumers:
            return 0, False
        missing = prompt_tokens - local_tokens
        return (missing, True) if missing > 0 else (0, False)

    def allocated(
        self,
        handle: str,
        params: Produce | Consume | None,
        prompt_tokens: int,
        block_ids: Sequence[int],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """The request has blocks: `block_ids` are all of them, `local_tokens` (whole blocks) are
        computed here, `external_tokens` are awaited. May be called again for the same request."""
        if isinstance(params, Consume):
            self._accept(handle, params, prompt_tokens, block_ids, local_tokens, external_tokens)
        elif isinstance(params, Produce) and handle not in self._producers:
            producer = self._producers[handle] = _Producer(prompt_tokens)
            if params.mode is Mode.WRITE:
                producer.told = True
                self._announcing.add(handle)
                self._outbox.append(Begin(handle, params.transfer_id, params.mode, params.consumers))

    def _accept(
        self, handle: str, params: Consume, prompt_tokens: int, block_ids: Sequence[int], local: int, external: int
    ) -> None:
        if handle in self._consumers:
            return  # the second call, after the load; or a recompute
        first = local // self._block_size
        last = self._blocks(prompt_tokens)
        if external <= 0:
            first = last  # nothing is needed; kvd is told, so that the producer is let go
        self._consumers[handle] = _Consumer(loading=external > 0)
        self._outbox.append(
            Accept(
                handle=handle,
                transfer_id=params.transfer_id,
                consumer=params.consumer,
                block_ids=tuple(block_ids[first:last]),
                first_block=first,
                ticket=params.ticket,
                peer_locator=params.peer_locator,
                stamped_ns=self._clock.monotonic_ns(),
            )
        )

    def step(self, scheduled: Iterable[ScheduledChunk], preempted: Iterable[str]) -> StepPlan:
        """Closes one scheduling round. `preempted` lost their blocks in it, whether or not they
        are scheduled again at once. Called once a round, also in rounds without work; only a round in
        which `idle` holds and no end has come may be left out."""
        self._step += 1
        sent: list[str] = []
        received: list[str] = []
        failed: list[str] = []
        for end in self._link.drain_ends():
            self._take(end, sent, received, failed)
        if self.idle:
            return StepPlan(self._step, (), (), tuple(sent), tuple(received), tuple(failed))
        fences = tuple(fence for handle in preempted for fence in self._preempt(handle))
        self._flush()
        chunks = tuple(chunk for item in scheduled for chunk in self._announce(item))
        return StepPlan(self._step, chunks, fences, tuple(sent), tuple(received), tuple(failed), self.pending())

    def finished(
        self,
        handle: str,
        params: Produce | Consume | None,
        block_ids: Sequence[int],
        computed_tokens: int,
        by_length: bool,
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. Returns (whether the engine must keep its blocks until `sent`,
        what goes out with its answer). `by_length`: it ran to max_tokens, was not aborted and did
        not stop. A duplicate call changes nothing."""
        if isinstance(params, Produce):
            return self._producer_finished(handle, params, block_ids, computed_tokens, by_length)
        if isinstance(params, Consume):
            self._consumer_finished(handle, params)
        return False, None

    def _producer_finished(
        self, handle: str, params: Produce, block_ids: Sequence[int], computed_tokens: int, by_length: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        producer = self._producers.get(handle)
        if producer is None:  # never got blocks: nobody may wait for it
            self._send(Cancel(params.transfer_id, ProducerFailed.reason))
            return False, None
        if producer.finished:
            return producer.held, None
        producer.finished = True
        self._announcing.discard(handle)
        complete = by_length and computed_tokens >= producer.prompt_tokens
        blocks = tuple(block_ids[: self._blocks(producer.prompt_tokens)])
        answer = handoff_params.offered(
            handoff_params.Offered(producer.prompt_tokens, len(blocks), producer.last_chunk_ns)
        )
        if producer.ended:
            del self._producers[handle]
            return False, answer if complete and producer.released else None
        if complete:
            producer.told = producer.held = True
            self._send(
                Offer(
                    handle=handle,
                    transfer_id=params.transfer_id,
                    attempt=producer.attempt,
                    block_ids=blocks,
                    tokens=producer.prompt_tokens,
                    mode=params.mode,
                    consumers=params.consumers,
                    stamped_ns=self._clock.monotonic_ns(),
                )
            )
            return True, answer
        if producer.told:  # bytes may be in flight from its blocks: fence first, then free
            producer.held = True
            self._send(Retract(handle, producer.attempt, True, ProducerFailed.reason))
            return True, None
        del self._producers[handle]
        self._send(Cancel(params.transfer_id, ProducerFailed.reason))
        return False, None

    def _consumer_finished(self, handle: str, params: Consume) -> None:
        consumer = self._consumers.get(handle)
        if consumer is None:  # aborted before it got blocks: let the producer go
            self._send(Cancel(params.transfer_id, ConsumerFailed.reason))
        elif consumer.ended:
            del self._consumers[handle]
        elif not consumer.finished:
            consumer.finished = True
            if consumer.loading:
                self._send(Cancel(params.transfer_id, ConsumerFailed.reason))

    def _send(self, message: Request) -> None:
        self._flush()
        self._link.send(message)

    def _flush(self) -> None:
        for message in self._outbox:
            self._link.send(message)
        self._outbox.clear()

    def _take(self, end: End, sent: list[str], received: list[str], failed: list[str]) -> None:
        handle = end.handle
        if self._on_end is not None:
            self._on_end(end)
        if (producer := self._producers.get(handle)) is not None and not producer.ended:
            producer.ended = True
            producer.released = end.outcome.good
            self._announcing.discard(handle)
            if producer.held:
                sent.append(handle)
                del self._producers[handle]
        elif (consumer := self._consumers.get(handle)) is not None and not consumer.ended:
            consumer.ended = True
            if consumer.loading:
                received.append(handle)
                if not end.outcome.good:
                    failed.append(handle)
            if consumer.finished:
                del self._consumers[handle]
        else:
            self.ignored_ends += 1

    def _preempt(self, handle: str) -> Iterable[Fence]:
        producer = self._producers.get(handle)
        if producer is None or producer.finished or producer.ended or not producer.told:
            return
        if any(message.handle == handle for message in self._outbox):
            self._flush()
        fence = Fence(handle, producer.attempt)
        self._link.send(Retract(handle, producer.attempt, False, ProducerFailed.reason))
        producer.attempt += 1  # counts only attempts that kvd was told of
        producer.announced = 0
        self._announcing.add(handle)
        yield fence

    def _announce(self, item: ScheduledChunk) -> Iterable[Chunk]:
        producer = self._producers.get(item.handle)
        if producer is None or item.handle not in self._announcing:
            return
        #   blocks   | announced |  whole after this step  | partial: goes with the chunk that fills it |
        #            0        first                     ready
        computed = item.computed_before + item.new_tokens
        last_chunk = computed >= producer.prompt_tokens
        ready = self._blocks(producer.prompt_tokens) if last_chunk else computed // self._block_size
        first = producer.announced
        if last_chunk:
            self._announcing.discard(item.handle)  # until it is preempted
            producer.last_chunk_ns = self._clock.monotonic_ns()
        if ready > first:
            producer.announced = ready
            yield Chunk(item.handle, producer.attempt, first, tuple(item.block_ids[first:ready]), ready)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
