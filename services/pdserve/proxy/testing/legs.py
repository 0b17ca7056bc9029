"""Legs that a test plays instead of gRPC, so that it orders every event of both."""

import asyncio
from typing import Generic, TypeVar

from pdserve.proxy.legs import DecodeEvent, DecodeOrder, Leg, PrefillEvent, PrefillOrder
from pdserve.proxy.types import EngineCard, Progress
from pdserve.rpc.errors import PdserveError

E = TypeVar("E")
O = TypeVar("O")  # noqa: E741 - an order


class ScriptedLeg(Generic[O, E]):
    """A leg that says what the test says, when the test says it."""

    def __init__(self, engine: EngineCard, order: O, traceparent: str, timeout: float) -> None:
        self.engine = engine
        self.order = order
        self.traceparent = traceparent
        self.timeout = timeout
        self.cancelled: PdserveError | None = None
        self.progress: Progress | None = None
        self.ended = asyncio.Event()
        """Set once the leg was cancelled, or has told its end."""
        self._events: asyncio.Queue[E | PdserveError | None] = asyncio.Queue()

    def say(self, *events: E) -> None:
        """The next events."""
        for event in events:
            self._events.put_nowait(event)

    def end(self) -> None:
        """Nothing more will be said."""
        self._events.put_nowait(None)

    def fail(self, error: PdserveError, progress: Progress | None = None) -> None:
        """The leg fails; `progress`: what the service says of how far it has come."""
        self.progress = progress
        self._events.put_nowait(error)

    async def receive(self) -> E | None:
        """See Leg."""
        if self.cancelled is not None:
            raise self.cancelled
        event = await self._events.get()
        if self.cancelled is not None:
            raise self.cancelled
        if event is None or isinstance(event, PdserveError):
            self.ended.set()
        if isinstance(event, PdserveError):
            raise event
        return event

    def cancel(self, error: PdserveError) -> None:
        """See Leg."""
        if not self.ended.is_set():
            self.cancelled = error
            self.ended.set()
            self._events.put_nowait(None)


class ScriptedLegs:
    """Legs that a test plays; `prefills` and `decodes` in the order in which they were opened."""

    def __init__(self) -> None:
        self.prefills: list[ScriptedLeg[PrefillOrder, PrefillEvent]] = []
        self.decodes: list[ScriptedLeg[DecodeOrder, DecodeEvent]] = []
        self.order: list[str] = []
        """"prefill" and "decode" as they were opened."""
        self._changed = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()

    def prefill(self, engine: EngineCard, order: PrefillOrder, traceparent: str, timeout: float) -> Leg[PrefillEvent]:
        """See Legs."""
        leg: ScriptedLeg[PrefillOrder, PrefillEvent] = ScriptedLeg(engine, order, traceparent, timeout)
        self.prefills.append(leg)
        self._opened("prefill")
        return leg

    def decode(self, engine: EngineCard, order: DecodeOrder, traceparent: str, timeout: float) -> Leg[DecodeEvent]:
        """See Legs."""
        leg: ScriptedLeg[DecodeOrder, DecodeEvent] = ScriptedLeg(engine, order, traceparent, timeout)
        self.decodes.append(leg)
        self._opened("decode")
        return leg

    async def nth_prefill(self, number: int) -> ScriptedLeg[PrefillOrder, PrefillEvent]:
        """Waits for the prefill leg of this number, from 0; the test's timeout bounds the wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.prefills) > number)
        return self.prefills[number]

    async def nth_decode(self, number: int) -> ScriptedLeg[DecodeOrder, DecodeEvent]:
        """Waits for the decode leg of this number, from 0; the test's timeout bounds the wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.decodes) > number)
        return self.decodes[number]

    def _opened(self, kind: str) -> None:
        self.order.append(kind)
        task = asyncio.create_task(self._wake())
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
