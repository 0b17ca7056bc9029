"""The demo's last step: the trace of an answer in each mode, held to what the answer itself says."""

import asyncio
import shutil
import sys
import time
from collections.abc import Sequence

from pdserve.cli import waterfall
from pdserve.cli.board import Board
from pdserve.cli.demo_check import Answer
from pdserve.cli.trace import Json, TraceStore

_ARRIVE_S = 10.0
"""Longest way of a trace from the end of its request into the store."""
_POLL_S = 0.25
_INDENT = "   "
_SAME_S = 1e-6
"""What two tellings of the same time may differ by."""


async def show(address: str, answers: Sequence[Answer], board: Board) -> list[str]:
    """Draws the last answer of each mode; what its trace lacks or says otherwise than the answer.

    Raises:
        PdserveError: the trace store does not answer.
    """
    store = TraceStore(address, timeout=_ARRIVE_S)
    style = waterfall.Style.of(sys.stdout, shutil.get_terminal_size().columns - len(_INDENT))
    faults: list[str] = []
    for answer in {answer.mode: answer for answer in answers}.values():
        request_id = answer.split.request_id
        trace = await _arrived(store, request_id)
        if trace is None:
            faults.append(f"{answer.name} {answer.mode}: no trace of {request_id} within {_ARRIVE_S:g} s")
            continue
        board.say(
            "\n".join(f"{_INDENT}{line}".rstrip() for line in waterfall.picture(trace, style, parts=False)) + "\n"
        )
        told, traced = answer.split.timings.ttft_seconds, trace["request"]["ttft"]
        if traced is None or abs(traced - told) > _SAME_S:
            faults.append(f"{answer.name} {answer.mode}: the trace's TTFT is {traced} s, the answer's {told} s")
    return faults


async def _arrived(store: TraceStore, request_id: str) -> Json | None:
    until = time.monotonic() + _ARRIVE_S
    while time.monotonic() < until:
        found = await asyncio.to_thread(store.requests, limit=1, id=request_id)
        if found:
            return await asyncio.to_thread(store.get, f"trace/{found[0]['trace_id']}", "spans")
        await asyncio.sleep(_POLL_S)
    return None
