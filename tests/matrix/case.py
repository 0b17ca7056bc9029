"""One case: a request is held in a phase, a fault strikes, the request goes on, and all is written down."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.client import AsyncStream, Completion
from pdserve.rpc.errors import PdserveError
from tests.matrix import faults
from tests.matrix.cells import Cell
from tests.matrix.faults import ARMED
from tests.matrix.fleet import Fleet, Pair, until
from tests.matrix.phases import Held, NotHeld, Phase
from tests.matrix.settings import ANSWER_S

_SET_UPS: Final = 3
"""Most times that a case is set up."""
_BACK_S: Final = 5.0
"""Longest wait for blocks to come back; how long it may take is the check's matter."""

Alone = Callable[[Sequence[int]], Awaitable[tuple[int, ...]]]
"""What one engine that knows of no hand-over answers."""


@dataclass(slots=True)
class Answer:
    """What the client of one request got."""

    tokens: tuple[int, ...] = ()
    completion: Completion | None = None
    error: PdserveError | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a case has shown."""

    pair: Pair
    answer: Answer
    tokens: tuple[int, ...]
    """That the answer should have."""
    seconds: float
    back_seconds: float
    """From the end of answer and fault until nothing was held."""
    expiries: dict[str, int]
    """Deadlines of kvd that ran out, by name."""
    unproven: str
    """Why it is not shown that the fault struck."""
    ended: list[dict[str, Any]]
    """The proxy's records of the request."""
    logged: list[tuple[str, dict[str, Any]]]
    """Everything that the members logged."""
    after: Answer
    """Of the next request."""
    tokens_after: tuple[int, ...]
    again: int = 0
    """Times that the case had to be set up anew."""


async def read(stream: AsyncStream) -> Answer:
    """The one answer of a request: a completion or a typed error."""
    answer = Answer()
    try:
        async for delta in stream:
            answer.tokens += delta.token_ids
        answer.completion = await stream.completion()
    except PdserveError as error:
        answer.error = error
    answer.request_id = stream.request_id
    return answer


async def run(fleet: Fleet, cell: Cell, alone: Alone) -> Seen:
    """Plays a case on a whole fleet, which may need healing afterwards.

    The proxy weighs what the last beats said: on a busy machine it may give the request to the other pair. Then
    nothing has been tried, and the case is set up once more.
    """
    for again in range(_SET_UPS - 1):
        try:
            return replace(await _run(fleet, cell, alone), again=again)
        except NotHeld as missed:
            print(f"{cell}: set up again: {missed}")
            await fleet.heal()
    return replace(await _run(fleet, cell, alone), again=_SET_UPS - 1)


async def _run(fleet: Fleet, cell: Cell, alone: Alone) -> Seen:
    pair = await fleet.primed()
    for member in fleet.members.values():
        member.log.mark()
    before, loop = await fleet.describe(), asyncio.get_running_loop()
    held, prompt, began = Held(fleet, cell.phase, pair, cell.mode), fleet.prompt(), loop.time()
    answer = await (
        _struck_before(held, cell, prompt) if cell.phase is Phase.REGISTERED else _struck(held, cell, prompt)
    )
    ended = loop.time()
    back = await until(lambda: fleet.held(since=ended), _BACK_S)
    unproven = await faults.unproven(cell.fault, held)
    expiries = _ran_out(before, await fleet.describe())
    await fleet.disarm()
    await until(fleet.not_serving, _BACK_S)
    prompt_after = fleet.prompt()
    async with fleet.stream(prompt_after, cell.mode) as stream:
        after = await read(stream)
    if after.completion is not None:
        fleet.went_well(after.completion)
    logged = [(name, event) for name, member in fleet.members.items() for event in member.log.events()]
    records = [event for _, event in logged if _ends(event, answer.request_id)]
    _met(held, cell, records)
    return Seen(
        pair=pair,
        answer=answer,
        tokens=await alone(prompt),
        seconds=ended - began,
        back_seconds=back,
        expiries=expiries,
        unproven=unproven,
        ended=records,
        logged=logged,
        after=after,
        tokens_after=await alone(prompt_after),
    )


async def _struck(held: Held, cell: Cell, prompt: Sequence[int]) -> Answer:
    await held.arm()
    async with _asked(held, prompt) as (stream, reading):
        await _waiting(held, reading)
        await until(lambda: _unnamed(stream), _BACK_S)  # its record is found by its name
        await faults.strike(cell.fault, held, stream)
        if not (cell.fault in ARMED and ARMED[cell.fault].hits(held)):
            await held.let_go()
        return await _the_answer(reading)


async def _waiting(held: Held, reading: asyncio.Task[Answer]) -> None:
    """Until the request waits where it should.

    Raises:
        NotHeld: it does not come there, or has its answer already.
    """
    reaching = asyncio.create_task(held.reached())
    try:
        await asyncio.wait({reaching, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reaching.done():
            raise NotHeld(f"answered without having been at {held.phase.value}: {reading.result()}")
        await reaching
    finally:
        reaching.cancel()
        await asyncio.gather(reaching, return_exceptions=True)


async def _unnamed(stream: AsyncStream) -> str:
    return "" if stream.request_id else "the client has not been told the request's name"


def _met(held: Held, cell: Cell, records: Sequence[dict[str, Any]]) -> None:
    """A request that waits nowhere, and the fault of one engine.

    Raises:
        NotHeld: the request was given to another.
    """
    if cell.phase is not Phase.REGISTERED or cell.fault not in ARMED:
        return
    where = ARMED[cell.fault].where
    if where not in ("prefill", "decode"):
        return
    for record in records:
        first = [held.fleet.name_of(str(tried[f"{where}_engine_id"])) for tried in record["attempts"][:1]]
        if first != [held.member(where)]:
            raise NotHeld(f"given to {first}, not to {held.member(where)}")


async def _struck_before(held: Held, cell: Cell, prompt: Sequence[int]) -> Answer:
    """The request comes when the fault has struck; while the process stands still, where it is stopped."""
    striking = asyncio.create_task(faults.strike(cell.fault, held, None))
    try:
        await asyncio.wait({striking}, timeout=0.1 if cell.fault in faults.STOPS else None)
        async with _asked(held, prompt) as (_, reading):
            return await _the_answer(reading)
    finally:
        await striking


@contextlib.asynccontextmanager
async def _asked(held: Held, prompt: Sequence[int]) -> Any:
    async with held.fleet.stream(prompt, held.mode) as stream:
        reading = asyncio.create_task(read(stream))
        try:
            yield stream, reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _the_answer(reading: asyncio.Task[Answer]) -> Answer:
    async with asyncio.timeout(ANSWER_S + 2.0):
        return await asyncio.shield(reading)


def _ran_out(before: kvd_pb2.DescribeResponse, now: kvd_pb2.DescribeResponse) -> dict[str, int]:
    base = before.expiries if before.kvd_epoch == now.kvd_epoch else {}
    counts = {name: count - base.get(name, 0) for name, count in now.expiries.items()}
    return {name: count for name, count in counts.items() if count}


def _ends(event: dict[str, Any], request_id: str) -> bool:
    return event.get("event") == "request_ended" and event.get("request_id") == request_id
