"""One request's record, out of what was seen of it while it ran. Pure."""

import itertools

from pdserve.bench.endpoint import Outcome, Trail, failure
from pdserve.bench.results import Failure, Record
from pdserve.bench.slo import Slo
from pdserve.bench.workload.asks import Ask
from pdserve.rpc.errors import PdserveError


def make_record(
    ask: Ask,
    due: float,
    begun: float,
    trail: Trail,
    outcome: Outcome | None,
    error: PdserveError | None,
    slo: Slo,
) -> Record:
    """One request's record out of its stamps. What a failed one has of them is kept, but it met no objective.

    Times are rounded to the microsecond before they are judged, so that who reads the file judges the same.
    """
    sent = trail.sent if trail.sent is not None else begun + due
    chunks = trail.chunks
    ttft = _rounded(chunks[0] - sent) if chunks else None
    itls = tuple(_rounded(later - earlier) for earlier, later in itertools.pairwise(chunks))
    due, went = _rounded(due), _rounded(sent - begun)
    if outcome is None or error is not None or ttft is None:
        reason = failure(error) if error is not None else Failure("NO_TOKEN", "the answer has no token")
        return Record(
            index=ask.index, due=due, sent=went, prompt_tokens=ask.prompt_tokens or 0, cached_tokens=0,
            output_tokens=len(chunks), ttft=ttft, itls=itls, tpot=None, e2e=None, missed=("error",), error=reason,
        )  # fmt: skip
    e2e = _rounded(chunks[-1] - sent)
    tpot = _rounded((e2e - ttft) / (outcome.output_tokens - 1)) if outcome.output_tokens > 1 else None
    prompt = outcome.prompt_tokens if outcome.prompt_tokens is not None else ask.prompt_tokens
    return Record(
        index=ask.index, due=due, sent=went, prompt_tokens=prompt or 0, cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens, ttft=ttft, itls=itls, tpot=tpot, e2e=e2e,
        mode=outcome.mode, transport=outcome.transport,
        parts={name: _rounded(value) for name, value in outcome.parts.items()},
        unattributed=_rounded(outcome.unattributed),
        missed=slo.missed(ttft=ttft, itls=itls, tpot=tpot, e2e=e2e),
    )  # fmt: skip


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
