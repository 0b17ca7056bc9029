"""The scheduler's half of the connector inside vLLM's EngineCore: translates vLLM's words into
SchedulerHandoff's and keeps the little that vLLM does not say twice."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from pdserve.engine.handoff import params as handoff_params
from pdserve.engine.handoff.scheduler import MonotonicNs, ScheduledChunk, SchedulerHandoff, SchedulerLink, StepPlan
from pdserve.engine.port import Consume, Produce
from pdserve.engine.vllm import news
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.kvd.client import Attachment, End, Hello, Participant
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest

log = structlog.get_logger(__name__)

ATTACH_TIMEOUT_S: Final = 10.0
IDLE_WAIT_S: Final = 0.002
"""Longest wait for an end in a step without work. EngineCore would spin; a new request waits for it."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of scheduling has for the workers."""

    plan: StepPlan
    failed_blocks: tuple[int, ...] = ()
    """The blocks that the plan's failed consumers waited for."""


IDLE: Final = Round(StepPlan(0))
"""The round of an engine that hands nothing over: always this one, so that it costs nothing to make."""


class Link(SchedulerLink, Protocol):
    """The scheduler's attachment to kvd."""

    @property
    def ends_available(self) -> threading.Event:
        """Set when an end has come."""
        ...

    def close(self) -> None:
        """Leaves kvd; safe twice."""
        ...


def attach(options: ConnectorOptions, identity: Mapping[str, str]) -> Attachment:
    """The scheduler's attachment.

    Raises:
        KvdUnavailable: no kvd in time.
        PdserveError: kvd refused the hello.
    """
    hello = Hello(options.engine_id, Participant.SCHEDULER, dict(identity), ranks=options.ranks)
    link = Attachment(options.kvd_socket, hello)
    link.start(ATTACH_TIMEOUT_S)
    return link


class SchedulerSide:
    """One per engine; called by EngineCore's thread only. Ids of requests are vLLM's internal ones."""

    def __init__(self, link: Link, block_size: int, clock: MonotonicNs) -> None:
        self._link = link
        self._handoff = SchedulerHandoff(link, block_size, clock, on_end=self._on_end)
        self._params: dict[str, Produce | Consume | None] = {}
        self._blocks: dict[str, list[int]] = {}
        """Of WRITE producers that compute: vLLM names only new blocks after the first chunk."""
        self._allocated: set[str] = set()
        """Requests whose entry in `_blocks` is complete for this round."""
        self._awaited: dict[str, tuple[int, ...]] = {}
        """Of consumers that load: the blocks that they wait for."""
        self._refused: set[str] = set()
        """Consumers whose hand-over failed and that may not compute the prompt here."""
        self._news: list[news.News] = []
        self._unsaid = False
        """Whether this round has something for kvd, which goes out when the round is closed."""

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """See SchedulerHandoff.matched; None: leave the request waiting.

        So waits a consumer that may not recompute, until its service, told of the failure, aborts
        it: vLLM's policy is one for the whole engine.
        """
        kv = self._kv(request)
        if kv is None:
            return 0, False
        if request.request_id in self._refused:
            return None, False
        return self._handoff.matched(request.request_id, kv, request.num_prompt_tokens, local_tokens)

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """See SchedulerHandoff.allocated."""
        kv = self._kv(request)
        if kv is None:
            return
        handle, prompt = request.request_id, request.num_prompt_tokens
        local = prompt - external_tokens if external_tokens else 0
        first_time = handle not in self._awaited
        self._handoff.allocated(handle, kv, prompt, block_ids, local, external_tokens)
        self._unsaid = True
        if isinstance(kv, Produce) and kv.mode is Mode.WRITE:
            self._blocks[handle] = list(block_ids)
            self._allocated.add(handle)
        if isinstance(kv, Consume) and external_tokens and first_time:
            self._awaited[handle] = tuple(block_ids)
            self._news.append(news.Taken(kv.transfer_id, kv.consumer, local))

    def round(self, output: Any) -> Round:
        """Closes a round of scheduling; `output` is vLLM's SchedulerOutput. Requests that lost their
        blocks in it are in `preempted_req_ids`."""
        if self._handoff.idle and not (self._unsaid or self._link.ends_available.is_set()):
            return IDLE
        if not (output.total_num_scheduled_tokens or self._unsaid or self._handoff.idle):
            self._link.ends_available.wait(IDLE_WAIT_S)
        plan = self._handoff.step(self._chunks(output), output.preempted_req_ids or ())
        self._allocated.clear()
        self._unsaid = False
        failed: list[int] = []
        for handle in plan.received:
            blocks = self._awaited.get(handle, ())
            if handle in plan.failed:
                failed += blocks
        return Round(plan, tuple(failed))

    def finished(self, request: Any, block_ids: Sequence[int], by_length: bool) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerHandoff.finished."""
        kv = self._kv(request)
        if kv is None:
            return False, None
        handle = request.request_id
        held, answer = self._handoff.finished(handle, kv, block_ids, request.num_computed_tokens, by_length)
        self._params.pop(handle, None)
        self._blocks.pop(handle, None)
        self._awaited.pop(handle, None)
        self._refused.discard(handle)
        return held, answer

    def take_news(self) -> list[news.News]:
        """The news since the last call."""
        taken, self._news = self._news, []
        return taken

    def close(self) -> None:
        """Leaves kvd; safe twice."""
        self._link.close()

    def _kv(self, request: Any) -> Produce | Consume | None:
        raw = request.kv_transfer_params
        if raw is None:
            return None
        handle = request.request_id
        if handle not in self._params:
            try:
                self._params[handle] = handoff_params.decode(raw)
            except InvalidRequest as error:
                # Only our own service fills this in; raising here would end the engine.
                log.error("engine.params_refused", handle=handle, error=error.message)
                self._params[handle] = None
        return self._params[handle]

    def _chunks(self, output: Any) -> Iterator[ScheduledChunk]:
        if not self._blocks:
            return
        announcing, tokens = self._handoff.announcing, output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if new.req_id in announcing:
                yield ScheduledChunk(new.req_id, self._blocks[new.req_id], new.num_computed_tokens, tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for handle, more, computed in rows:
            if handle in announcing:
                blocks = self._blocks[handle]
                if more and handle not in self._allocated:
                    blocks.extend(more[0])
                yield ScheduledChunk(handle, blocks, computed, tokens[handle])

    def _on_end(self, end: End) -> None:
        if end.outcome.good or end.producer:
            return
        kv = self._params.get(end.handle)
        if isinstance(kv, Consume):
            self._news.append(news.failure(end))
            if not kv.recompute:
                self._refused.add(end.handle)
