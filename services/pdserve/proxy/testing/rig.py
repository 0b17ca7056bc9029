"""A driver between real admission and legs that a test plays: every order of events, no network."""

import asyncio
import itertools
import time
from contextlib import aclosing
from typing import Any

from pdserve.proxy.admission import Admission
from pdserve.proxy.credits import Ledger
from pdserve.proxy.drive import Driver, DriveSettings
from pdserve.proxy.ended import Ended
from pdserve.proxy.job import Job
from pdserve.proxy.legs import Done, Ready, Tokens
from pdserve.proxy.owner import Owner
from pdserve.proxy.parts import Point
from pdserve.proxy.registry import Registry
from pdserve.proxy.testing.legs import ScriptedLegs
from pdserve.proxy.trace import TraceContext
from pdserve.proxy.types import Delta, Event, Finish, Mode, OnFailure, Route, Sampling, Stamps, TransferFacts
from pdserve.runtime.beats import Beat
from pdserve.runtime.clock import Clock, boot_id

FACTS = TransferFacts(kv_bytes=4096, transport="shm")


def ready(ticket: bytes = b"ticket", cached: int = 0) -> Ready:
    """Prefill's offer."""
    return Ready(ticket, 65, cached, Stamps(boot_id(), {5: 1, 6: 1, 7: 1}))


def tokens(text: str = "a", finish: Finish | None = None) -> Tokens:
    """One token of decode."""
    return Tokens(Delta(0, text, (97,), finish=finish), Stamps(boot_id(), {8: 1, 9: 1, 10: 1, 11: 1, 12: 1, 13: 1}))


def done(recomputed: int = 0, cached: int = 0) -> Done:
    """Decode's end."""
    return Done(1, cached, recomputed, FACTS)


class Rig:
    """Engines p0, p1, ... and d0, d1, ..., scripted legs, a driver and the records of its jobs."""

    def __init__(
        self,
        prefills: int = 1,
        decodes: int = 1,
        both: int = 0,
        *,
        hold_timeout: float = 0.0,
        hold_length: int = 8,
        **settings: Any,
    ) -> None:
        """`hold_timeout`, `hold_length`: of requests that wait for an engine; the rest is DriveSettings."""
        self.registry = Registry()
        self.ledger = Ledger()
        self.admission = Admission(
            self.registry,
            self.ledger,
            time.monotonic,
            length=8,
            timeout=5.0,
            hold_length=hold_length,
            hold_timeout=hold_timeout,
        )
        self.legs = ScriptedLegs()
        self.owner = Owner()
        self.ids = itertools.count(1)
        self.ended: list[Ended] = []
        self.driver = Driver(
            self.admission,
            self.legs,
            self.owner,
            Clock(),
            lambda size: next(self.ids).to_bytes(size, "big"),
            DriveSettings(**({"grace": 0.01} | settings)),
            self.ended.append,
        )
        for role, count in (("prefill", prefills), ("decode", decodes), ("both", both)):
            for number in range(count):
                self.register(f"{role[0]}{number}", role)

    def register(self, engine_id: str, role: Any) -> None:
        """A routable engine."""
        beat = Beat(
            type="D",
            http_address="h",
            zmq_address="",
            dp_size=1,
            tp_size=1,
            transfer_mode="READ",
            engine_id=engine_id,
            grpc_address=engine_id,
            locator=f"locator of {engine_id}".encode(),
            model="m",
            tokenizer="bytes",
            role=role,
            identity={},
            max_model_len=1000,
            block_size=16,
            total_kv_tokens=160,
            free_kv_tokens=160,
            running=0,
            waiting=0,
            steps=0,
            state="ready",
            beat=1,
            sent_at=0.0,
        )
        self.registry.beat(beat, time.monotonic())
        entry = self.registry.get(engine_id)
        assert entry is not None
        self.ledger.joined(entry.card)
        self.registry.channel_ready(engine_id)

    def join(self, engine_id: str, role: Any) -> None:
        """One more engine, of which those that wait hear."""
        self.register(engine_id, role)
        self.admission.pump()

    def leave(self, engine_id: str) -> None:
        """An engine is gone, and those that wait hear of it."""
        self.registry.channel_broken(engine_id, "the test says so")
        self.ledger.left(engine_id)
        self.admission.pump()

    def job(self, mode: Mode = Mode.READ, **changes: Any) -> Job:
        """A request of 20 prompt tokens."""
        fields: dict[str, Any] = {
            "request_id": "r",
            "trace": TraceContext("1" * 32, "2" * 16, "", True),
            "model": "m",
            "prompt": tuple(range(20)),
            "sampling": Sampling(max_tokens=4, min_tokens=2, stop=("x",), logprobs=1, temperature=0.5, seed=7),
            "mode": mode,
            "route": Route.SPLIT,
            "on_failure": OnFailure.FAIL,
            "deadline": time.monotonic() + 60,
            "points": {Point.RECEIVED: 0, Point.TOKENIZED: 0},
        }
        return Job(**(fields | changes))

    def start(self, job: Job) -> "Running":
        """Runs a job in a task of its own."""
        return Running(self.driver, job)

    def held(self) -> int:
        """Tokens reserved on all engines."""
        return sum(self.ledger.reserved(entry.card.engine_id) for entry in self.registry.entries())

    async def queued(self, requests: int) -> None:
        """Lets the loop turn until so many wait, for credits or for engines."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(self.admission) == requests

    async def nothing_is_held(self) -> None:
        """Both legs have ended and every credit is back."""
        await self.owner.idle()
        await self.driver.idle()
        assert self.held() == 0
        assert all(leg.ended.is_set() for leg in self.legs.prefills)
        assert all(leg.ended.is_set() for leg in self.legs.decodes)


class Running:
    """A job that runs."""

    def __init__(self, driver: Driver, job: Job) -> None:
        self.events: list[Event] = []
        self._new = asyncio.Event()
        self.task = asyncio.create_task(self._run(driver, job))

    async def _run(self, driver: Driver, job: Job) -> None:
        async with aclosing(driver.run(job)) as events:
            async for event in events:
                self.events.append(event)
                self._new.set()

    async def until(self, kind: type) -> Any:
        """Waits for an event of this kind."""
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    return event
            await self.changed()

    async def changed(self) -> None:
        """Waits for the next event, whatever it is; the test's timeout bounds the wait."""
        self._new.clear()
        await self._new.wait()

    async def cancel(self) -> None:
        """The client goes away."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
