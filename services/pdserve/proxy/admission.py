"""Who may start now: one FIFO queue in front of the engines' credits.

A request is granted when a choice of engines has credits for all of it at once, on both sides; so
two requests never hold half each. First come, first served: a waiter that does not fit keeps
whatever it could use from those behind it, so that a long prompt cannot starve. Grants are handed
out in that order and each opens its decode leg before its prefill leg: prefill runs in the order of
decode's reservations.

The queue is bounded in number and in time; beyond either a request is refused with OVERLOADED. What no set of
engines could serve, however empty, is no matter of credits: `holding.py`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from pdserve.proxy.credits import Ledger, Reservation
from pdserve.proxy.holding import Holding, Waited
from pdserve.proxy.registry import Entry, Registry
from pdserve.proxy.routing import Choice, Need, Router
from pdserve.proxy.types import Role, Route
from pdserve.proxy.waiting import comes, nobody
from pdserve.rpc.errors import (
    DeadlinePassed,
    Draining,
    IncompatibleEngines,
    KvdUnavailable,
    NoEngines,
    Overloaded,
    PdserveError,
)


@dataclass(slots=True)
class Grant:
    """The engines of one attempt and the tokens held on them."""

    choice: Choice
    prefill: Reservation | None
    decode: Reservation
    _changed: Callable[[], None]

    def release_prefill(self) -> None:
        """Prefill's blocks are free again; safe twice."""
        if self.prefill is not None and self.prefill.release():
            self._changed()

    def release_decode(self) -> None:
        """Decode's blocks are free again; safe twice."""
        if self.decode.release():
            self._changed()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request wants to be admitted for."""

    model: str
    need: Need
    route: Route
    exclude: frozenset[str] = frozenset()
    """Engines that failed it before."""
    decode_only: bool = False
    """Compute the prompt at a decode engine; `route` does not matter."""


@dataclass(slots=True, eq=False)
class _Waiter:
    claim: Claim
    again: bool
    granted: asyncio.Future[Grant] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Hands out grants. Call `pump` when an engine's state or credits have changed."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        now: Callable[[], float],
        *,
        length: int,
        timeout: float,
        hold_length: int = 0,
        hold_timeout: float = 0.0,
    ) -> None:
        """`length`: most waiters; `timeout`: seconds that one waits; the other two: see Holding."""
        self._registry = registry
        self._ledger = ledger
        self._router = Router(ledger)
        self._now = now
        self._length = length
        self._timeout = timeout
        self._waiters: deque[_Waiter] = deque()
        self.holding = Holding(now, length=hold_length, timeout=hold_timeout)
        self._looked = registry.version
        self._closed = False
        self._stopped = ""
        self._candidates: dict[tuple[str, Route], tuple[int, list[Choice]]] = {}

    def __len__(self) -> int:
        """Requests that wait, for credits or for engines."""
        return len(self._waiters) + len(self.holding)

    def candidates(self, model: str, route: Route, *, recompute: bool = False) -> list[Choice]:
        """What could serve a request if it were empty; kept until the set of engines changes. `recompute`: where
        kvd takes no hand-over, decode engines that compute the prompt could.

        Raises:
            NoEngines, IncompatibleEngines: nothing could.
            KvdUnavailable: pairs could, if their kvds did not drain.
        """
        key = (model, route)
        kept = self._candidates.get(key)
        if kept is None or kept[0] != self._registry.version:
            engines = self._registry.routable(model)
            try:
                found = self._router.candidates(engines, route)
            except KvdUnavailable:
                if recompute:
                    return self._router.alone(engines)
                raise
            kept = self._candidates[key] = (self._registry.version, found)
        return kept[1]

    def check_open(self) -> None:
        """Raises Draining where the proxy takes nothing new."""
        if self._closed:
            raise Draining(self._stopped or "this proxy is draining; try another")

    def check_room(self) -> None:
        """Refuses early, before a prompt costs anything.

        Raises:
            Overloaded: the queue is full.
            Draining: the proxy takes nothing new.
        """
        self.check_open()
        if len(self._waiters) >= self._length:
            raise Overloaded(f"{self._length} requests wait already", queue=str(self._length))

    async def admit(
        self, claim: Claim, deadline: float, *, again: bool = False, waits: Callable[[], None] = nobody
    ) -> Grant:
        """Waits for credits until `deadline` (monotonic seconds) or the queue's own timeout. A
        request that was granted before and failed goes first (`again`) and is not bounded by the
        queue's length. Cancelling gives back what was granted in between. `waits` is called where
        it is not granted at once.

        Raises:
            Overloaded: the queue is full, or the timeout passed.
            DeadlinePassed: the request's own deadline came first.
            NoEngines, IncompatibleEngines: nothing can serve it, now or while it waited.
            KvdUnavailable: a pair could, but for a kvd that drains.
            Draining: the proxy takes nothing new, or has stopped.
        """
        if self._stopped:
            raise Draining(self._stopped)
        if not again:
            self.check_room()
        self._check_possible(claim)
        waiter = _Waiter(claim, again)
        if again:  # in front, behind those that are tried again already
            self._waiters.insert(sum(other.again for other in self._waiters), waiter)
        else:
            self._waiters.append(waiter)
        self.pump()
        if waiter.granted.done():
            return waiter.granted.result()
        left = deadline - self._now()
        try:
            waits()
            if await comes(waiter.granted, min(left, self._timeout)):
                return waiter.granted.result()
            if left <= self._timeout:
                raise DeadlinePassed("the request's deadline passed while it waited for credits")
            raise Overloaded(f"no engine had room for {claim.need.prompt} prompt tokens within {self._timeout:g} s")
        except asyncio.CancelledError:
            if waiter.granted.done() and waiter.granted.exception() is None:
                grant = waiter.granted.result()  # granted and cancelled in the same turn of the loop
                grant.release_prefill()
                grant.release_decode()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.pump()  # it may have kept engines from those behind it

    async def hold(
        self, claims: Sequence[Claim], deadline: float, waited: Waited, *, waits: Callable[[], None] = nobody
    ) -> None:
        """Waits until a set of engines, if it were empty, could serve one of the claims; see Holding.until.

        Raises:
            NoEngines: none came in time.
            IncompatibleEngines: those that are there may not exchange KV, which waiting does not change.
            KvdUnavailable: their kvd drains; an operator may take as long for that as he likes.
            DeadlinePassed, Draining: see Holding.until.
        """

        def possible() -> None:
            raised: dict[type[PdserveError], PdserveError] = {}
            for claim in claims:
                try:
                    self._check_possible(claim)
                except (NoEngines, KvdUnavailable, IncompatibleEngines) as error:
                    raised.setdefault(type(error), error)
                else:
                    return
            raise raised.get(NoEngines) or raised.get(KvdUnavailable) or raised[IncompatibleEngines]

        await self.holding.until(possible, deadline, waited, waits)

    def could(self, claim: Claim) -> bool:
        """Whether a set of engines, if it were empty, could serve the claim now."""
        try:
            self._check_possible(claim)
        except (NoEngines, KvdUnavailable, IncompatibleEngines):
            return False
        return True

    def pump(self) -> None:
        """Grants what can be granted, in order."""
        if self._looked != self._registry.version:
            self._looked = self._registry.version
            self.holding.look()
        kept: set[str] = set()  # engines that a waiter further ahead waits for
        for waiter in tuple(self._waiters):
            if waiter.granted.done():  # timed out or cancelled, and about to leave
                continue
            claim = waiter.claim
            engines = self._registry.routable(claim.model)
            if engines and all(entry.card.engine_id in kept for entry in engines):
                continue
            try:
                choice = self._choose(engines, claim, kept | claim.exclude)
                if choice is None:
                    self._check_possible(claim)
            except PdserveError as error:  # the engines it waited for have gone
                self._waiters.remove(waiter)
                waiter.granted.set_exception(error)
                continue
            if choice is None:
                kept.update(entry.card.engine_id for entry in engines if self._wants(entry, claim))
                continue
            self._waiters.remove(waiter)
            waiter.granted.set_result(self._reserve(choice, claim.need))

    def close(self) -> None:
        """Takes nothing new; what waits keeps its place, but for requests that wait for their first engine."""
        self._closed = True
        self.holding.look()

    def stop(self, why: str) -> None:
        """Takes nothing at all; what waits ends with DRAINING. Safe twice."""
        self._closed, self._stopped = True, why
        self.holding.stop(why)
        for waiter in self._waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(Draining(why))

    def _choose(self, engines: list[Entry], claim: Claim, exclude: Collection[str]) -> Choice | None:
        now = self._now()

        def missed(entry: Entry) -> int:
            return self._registry.missed(entry, now)

        if claim.decode_only:
            return self._router.choose_decode(engines, claim.need, missed, exclude)
        return self._router.choose(engines, claim.need, claim.route, missed, exclude)

    def _check_possible(self, claim: Claim) -> None:
        """Raises where no set of engines, however empty, could serve the claim."""
        engines = [e for e in self._registry.routable(claim.model) if e.card.engine_id not in claim.exclude]
        if claim.decode_only:
            if not any(self._wants(entry, claim) for entry in engines):
                raise NoEngines("no decode engine is left to compute the prompt again")
            return
        for choice in self._router.candidates(engines, claim.route):
            prefill_fits = choice.prefill is None or claim.need.can_prefill(choice.prefill)
            if prefill_fits and claim.need.can_decode(choice.decode):
                return
        raise NoEngines("no engines that are left can hold this request")

    def _wants(self, entry: Entry, claim: Claim) -> bool:
        """Whether the claim could use this engine if it were empty."""
        need, card = claim.need, entry.card
        if entry.kvd_draining and card.role is not Role.BOTH and not claim.decode_only:
            return False
        if card.role is Role.PREFILL:
            usable = claim.route is not Route.COLOCATED and not claim.decode_only
            return usable and need.can_prefill(card)
        if card.role is Role.DECODE:
            usable = claim.route is not Route.COLOCATED or claim.decode_only
        else:
            usable = claim.route is not Route.SPLIT or claim.decode_only
        return usable and need.can_decode(card)

    def _reserve(self, choice: Choice, need: Need) -> Grant:
        decode = self._ledger.reserve(choice.decode.engine_id, need.of_decode(choice.decode))
        prefill: Reservation | None = None
        if choice.prefill is not None:
            prefill = self._ledger.reserve(choice.prefill.engine_id, need.of_prefill(choice.prefill))
        return Grant(choice, prefill, decode, self.pump)
