"""Decode steps out of the times at which a batch's tokens came. Pure."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.planner.measuring.points import DecodePoint

_FEWEST = 4
"""Steps that a median is worth taking of."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream of a batch."""

    engine_id: str
    """Which engine decoded it."""
    prompt_tokens: int
    """Its context before its first token."""
    times: tuple[float, ...]
    """When each token came, seconds of one clock, ascending; tokens of one piece have one time."""


def decode_points(answers: Sequence[Answer]) -> list[DecodePoint]:
    """What each engine did while all of its streams decoded: up to two points an engine, of the first and the second
    half of that time, since contexts grow.

    Outside of it the batch was smaller, or prompts were computed. The median of the gaps is taken, so that the
    unsteadiness of a stream's way to the client, and a stall, do not count.
    """
    points = []
    for engine in dict.fromkeys(answer.engine_id for answer in answers):
        batch = [answer for answer in answers if answer.engine_id == engine and answer.times]
        begin, end = max(answer.times[0] for answer in batch), min(answer.times[-1] for answer in batch)
        steps = min(sum(begin <= time <= end for time in answer.times) for answer in batch) - 1
        halves = 2 if steps >= 4 * _FEWEST else 1
        for half in range(halves):
            first = begin + (end - begin) * half / halves
            last = begin + (end - begin) * (half + 1) / halves
            point = _point(batch, first, last)
            if point is not None:
                points.append(point)
    return points


def _point(batch: Sequence[Answer], first: float, last: float) -> DecodePoint | None:
    gaps: list[float] = []
    context = 0.0
    for answer in batch:
        within = [time for time in answer.times if first <= time <= last]
        gaps += [later - earlier for earlier, later in itertools.pairwise(within) if later > earlier]
        before = sum(time < first for time in answer.times)
        context += answer.prompt_tokens + before + len(within) / 2
    if len(gaps) < _FEWEST * len(batch):
        return None
    return DecodePoint(len(batch), context, statistics.median(gaps))


def seen_at(answer: Answer, time: float) -> int:
    """Context of a stream at a moment: its prompt and the tokens that had come."""
    return answer.prompt_tokens + sum(when <= time for when in answer.times)
