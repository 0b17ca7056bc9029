"""What must be true of every case; each finding is a sentence."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from tests.matrix import settings
from tests.matrix.case import Answer, Seen
from tests.matrix.cells import Cell, Expected, expected
from tests.matrix.faults import Fault

_DEFECTS: Final = frozenset(
    {
        "kvd_defect", "sim.corrupt_kv", "sim.engine_died", "kvd.client_failed", "unexpected_error", "task_died",
        "calls_left", "failpoint_never_released", "watch_failed",
    }
)  # fmt: skip
"""Log events that only a defect explains, whatever the fault."""


def findings(cell: Cell, seen: Seen) -> list[str]:
    """What is not as it must be."""
    want = expected(cell)
    return [
        *_answer(cell, want, seen),
        *_record(cell, want, seen),
        *_back(want, seen),
        *_next(seen),
        *([seen.unproven] if seen.unproven else []),
        *defects(seen.logged),
    ]


def defects(logged: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """What members logged that only a defect explains."""
    return [f"{event['event']} in the log of {name}: {event}" for name, event in logged if event["event"] in _DEFECTS]


def _answer(cell: Cell, want: Expected, seen: Seen) -> Iterator[str]:
    """(a) One typed terminal answer within the deadline; (c) no token differs."""
    answer = seen.answer
    if seen.seconds > settings.ANSWER_S:
        yield f"the answer took {seen.seconds:.1f} s"
    if answer.tokens != seen.tokens[: len(answer.tokens)]:
        yield f"tokens {answer.tokens} differ from {seen.tokens}"
    if answer.error is not None:
        if want.answered:
            yield f"an error in place of an answer: {answer.error.reason}: {answer.error.message}"
        elif answer.error.reason not in want.reasons:
            yield f"{answer.error.reason} is none of {sorted(want.reasons)}: {answer.error.message}"
        return
    if want.answered is False:
        yield f"an answer in place of an error out of {sorted(want.reasons)}"
    yield from _whole(answer, seen)
    completion = answer.completion
    if completion is None:
        return
    disturbed = completion.fallbacks + completion.continuations
    if want.path == "pair" and (disturbed or completion.recomputed_tokens):
        yield f"disturbed: {disturbed} more attempts, {completion.recomputed_tokens} tokens recomputed"
    if want.path in ("elsewhere", "alone") and not disturbed:
        yield "the fault left no trace"
    if want.path == "alone" and completion.recomputed_tokens != settings.PROMPT:
        yield f"{completion.recomputed_tokens} tokens recomputed"


def _whole(answer: Answer, seen: Seen) -> Iterator[str]:
    if answer.tokens != seen.tokens:
        yield f"{len(answer.tokens)} of {len(seen.tokens)} tokens"
    elif answer.completion is None or answer.completion.token_ids != seen.tokens:
        yield "the completion is not what was streamed"


def _record(cell: Cell, want: Expected, seen: Seen) -> Iterator[str]:
    """(e) The proxy's one record of the request names the cause."""
    if cell.fault is Fault.PROXY_KILLED:
        return  # who would write it is dead
    if len(seen.ended) != 1:
        yield f"{len(seen.ended)} records of the request's end"
        return
    (record,) = seen.ended
    outcome = "finished" if seen.answer.error is None else "cancelled" if cell.fault is Fault.CANCEL else "failed"
    if record["outcome"] != outcome:
        yield f"the record says {record['outcome']}, the client got {outcome}"
    reasons = [attempt["reason"] for attempt in record["attempts"] if attempt["reason"]]
    if unexpected := sorted(set(reasons) - want.reasons):
        yield f"attempts failed for {unexpected}, expected are {sorted(want.reasons)}: {record['attempts']}"
    if outcome != "finished" and record["reason"] not in want.reasons:
        yield f"the record gives {record['reason']!r} as the cause"
    first = record["attempts"][0] if record["attempts"] else None
    if want.path == "elsewhere" and (first is None or not first["reason"]):
        yield f"the first attempt did not fail: {record['attempts']}"


def _back(want: Expected, seen: Seen) -> Iterator[str]:
    """(b) Every block is back in time, and by release, not by a deadline."""
    if seen.back_seconds > want.back:
        yield f"blocks were back after {seen.back_seconds:.2f} s, not {want.back:.2f}"
    if unexpected := sorted(set(seen.expiries) - want.expiries):
        yield f"deadlines ran out: {unexpected}"


def _next(seen: Seen) -> Iterator[str]:
    """(d) The next request of the same mode succeeds."""
    after = seen.after
    if after.error is not None:
        yield f"the next request failed: {after.error.reason}: {after.error.message}"
    elif after.tokens != seen.tokens_after:
        yield f"the next request's tokens {after.tokens} differ from {seen.tokens_after}"
