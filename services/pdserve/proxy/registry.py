"""Which engines there are, from their beats. Pure: beats and the time in, changes out.

An engine is *routable* when it says "ready", its channel is up, and its beats and steps go on:

    beat ────▶ listed ── channel ready ──▶ routable
                 ▲                            │ 3 beats missed, channel broken, bye, replaced: gone
                 └── steps move again ◀───────┤ step counter stands still while work waits: stuck

`Left` means that the engine's open legs cannot end well any more, unless it is graceful.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.proxy.types import EngineCard, Role
from pdserve.rpc.errors import InvalidRequest, Overloaded
from pdserve.runtime.beats import LIFETIME, Beat, Foreign

MAX_FOREIGN = 256
"""Stock instances that are listed: they prove nothing, so their number is bounded."""
FOREIGN_AGE = 10.0
"""Seconds until a silent stock instance is dropped: it beats every 3 s."""
REMEMBERED = 300.0
"""Seconds that a model is known after the last beat of its last engine: a new one may take minutes to load it."""


@dataclass(frozen=True, slots=True)
class Joined:
    """An engine that has to be dialled."""

    card: EngineCard


@dataclass(frozen=True, slots=True)
class Left:
    """An engine that is not there any more."""

    engine_id: str
    reason: str
    """For people."""
    graceful: bool
    """It said bye: what it still answers is good."""


Change = Joined | Left


@dataclass(slots=True)
class Entry:
    """One registered engine as its last beat told it."""

    card: EngineCard
    draining: bool
    free_kv_tokens: int
    running: int
    waiting: int
    steps: int
    beat: int
    heard_at: float
    """Monotonic seconds of the proxy."""
    connected: bool = False
    stalled: int = 0
    """Beats in a row whose step counter stood still while work waited."""
    stuck: bool = False
    kvd_draining: bool = False
    """Its kvd takes no new hand-overs: it serves what needs none."""

    @property
    def routable(self) -> bool:
        """Whether requests may go to it."""
        return self.connected and not self.draining and not self.stuck

    def excluded_because(self) -> str:
        """Why nothing goes to it; empty when something may."""
        if self.stuck:
            return f"its step counter stands still for {self.stalled} beats while work waits"
        if self.draining:
            return "it is draining"
        if not self.connected:
            return f"no gRPC connection to {self.card.address}"
        return ""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A stock MORI-IO instance."""

    instance: Foreign
    heard_at: float


class Registry:
    """The engines behind the proxy."""

    def __init__(self, interval: float = 1.0, missed: int = 3, stalled: int = 3, settle: int = 0) -> None:
        """`interval`: seconds between beats; `missed`: beats until eviction; `stalled`: beats with a standing step
        counter until an engine counts as stuck; `settle`: beats from the first on until `settled`."""
        self._interval = interval
        self._missed = missed
        self._stalled = stalled
        self._settle = settle * interval
        self._settles_at: float | None = None
        self.settled = not settle
        """Whether every engine that is there has had the time to be heard: a model not known then is unknown."""
        self._entries: dict[str, Entry] = {}
        self._by_address: dict[str, str] = {}
        self._gone: dict[str, float] = {}  # ids that said bye or were replaced: late beats do not revive them
        self._foreign: dict[str, Stranger] = {}
        self._remembered: dict[str, float] = {}  # models of engines that have left, and when one was heard last
        self.version = 0
        """Changes whenever the set of routable engines may have changed, or what is known of models."""

    def beat(self, beat: Beat, now: float) -> list[Change]:
        """Takes an authenticated beat.

        Raises:
            InvalidRequest: an older beat than the last, of an engine that has ended, or a second
                engine under one id.
        """
        if beat.engine_id in self._gone:
            raise InvalidRequest(f"engine {beat.engine_id} has ended")
        if self._settles_at is None:
            self._settles_at = now + self._settle
        entry = self._entries.get(beat.engine_id)
        if entry is not None:
            if beat.beat <= entry.beat:
                raise InvalidRequest(f"beat {beat.beat} of {beat.engine_id} after beat {entry.beat}")
            if beat.grpc_address != entry.card.address:
                raise InvalidRequest(f"engine {beat.engine_id} is registered at {entry.card.address}")
        if beat.state == "bye":
            self._gone[beat.engine_id] = now + LIFETIME
            return list(self._remove(beat.engine_id, "it said bye", graceful=True))
        if entry is None:
            return self._join(beat, now)
        return self._update(entry, beat, now)

    def foreign(self, instance: Foreign, now: float) -> None:
        """Lists a stock instance.

        Raises:
            Overloaded: too many are listed.
        """
        if instance.http_address not in self._foreign and len(self._foreign) >= MAX_FOREIGN:
            raise Overloaded(f"{MAX_FOREIGN} foreign instances are listed already")
        self._foreign[instance.http_address] = Stranger(instance, now)

    def channel_ready(self, engine_id: str) -> None:
        """Its gRPC channel is up."""
        entry = self._entries.get(engine_id)
        if entry is not None and not entry.connected:
            entry.connected = True
            self.version += 1

    def channel_broken(self, engine_id: str, reason: str) -> list[Change]:
        """A channel that was up is down: evicts at once. Its next beat makes it join anew."""
        return list(self._remove(engine_id, f"its gRPC channel broke: {reason}", graceful=False))

    def expire(self, now: float) -> list[Change]:
        """Evicts what has missed its beats, and settles; call it at least once a beat interval."""
        if not self.settled and self._settles_at is not None and now >= self._settles_at:
            self.settled = True
            self.version += 1
        for engine_id in [key for key, until in self._gone.items() if now >= until]:
            del self._gone[engine_id]
        for address in [key for key, stranger in self._foreign.items() if now - stranger.heard_at > FOREIGN_AGE]:
            del self._foreign[address]
        for model in [key for key, heard_at in self._remembered.items() if now - heard_at > REMEMBERED]:
            del self._remembered[model]
        late = [key for key, entry in self._entries.items() if self._silent(entry, now) >= self._missed]
        return [change for key in late for change in self._remove(key, f"{self._missed} beats missed", graceful=False)]

    def missed(self, entry: Entry, now: float) -> int:
        """Beats that an engine owes, counting half an interval of grace, or that stood still."""
        return max(entry.stalled, self._silent(entry, now))

    def _silent(self, entry: Entry, now: float) -> int:
        return max(math.floor((now - entry.heard_at) / self._interval - 0.5), 0)

    def get(self, engine_id: str) -> Entry | None:
        """An engine by id."""
        return self._entries.get(engine_id)

    def entries(self) -> list[Entry]:
        """All engines of ours, in order of arrival."""
        return list(self._entries.values())

    def routable(self, model: str) -> list[Entry]:
        """The engines of a model that requests may go to."""
        return [entry for entry in self._entries.values() if entry.card.model == model and entry.routable]

    def models(self) -> list[str]:
        """Models of all listed engines, routable or not, sorted."""
        return sorted({entry.card.model for entry in self._entries.values()})

    def known(self) -> list[str]:
        """Those, and the models whose last engine has left not long ago and may come back; sorted."""
        return sorted({*self.models(), *self._remembered})

    def strangers(self) -> list[Stranger]:
        """The stock instances."""
        return list(self._foreign.values())

    def _join(self, beat: Beat, now: float) -> list[Change]:
        changes: list[Change] = []
        before = self._by_address.get(beat.grpc_address)
        if before is not None:  # two processes cannot serve one address: the old one is gone
            self._gone[before] = now + LIFETIME
            changes.extend(self._remove(before, f"restarted as {beat.engine_id}", graceful=False))
        entry = Entry(
            card=_card(beat),
            draining=beat.state == "draining",
            free_kv_tokens=beat.free_kv_tokens,
            running=beat.running,
            waiting=beat.waiting,
            steps=beat.steps,
            beat=beat.beat,
            heard_at=now,
            kvd_draining=beat.kvd_draining,
        )
        self._entries[beat.engine_id] = entry
        self._by_address[beat.grpc_address] = beat.engine_id
        self.version += 1
        return [*changes, Joined(entry.card)]

    def _update(self, entry: Entry, beat: Beat, now: float) -> list[Change]:
        stands = beat.steps == entry.steps and beat.waiting > 0 and entry.waiting > 0
        entry.stalled = entry.stalled + 1 if stands else 0
        if (entry.draining, entry.kvd_draining) != (beat.state == "draining", beat.kvd_draining):
            entry.draining, entry.kvd_draining = beat.state == "draining", beat.kvd_draining
            self.version += 1
        entry.card = _card(beat)
        entry.free_kv_tokens, entry.running, entry.waiting = beat.free_kv_tokens, beat.running, beat.waiting
        entry.steps, entry.beat, entry.heard_at = beat.steps, beat.beat, now
        if entry.stuck and not stands:
            entry.stuck = False
            return [Joined(entry.card)]
        if not entry.stuck and entry.stalled >= self._stalled:
            entry.stuck, entry.connected = True, False
            self.version += 1
            return [Left(beat.engine_id, entry.excluded_because(), graceful=False)]
        return []

    def _remove(self, engine_id: str, reason: str, *, graceful: bool) -> Iterator[Change]:
        entry = self._entries.pop(engine_id, None)
        if entry is None:
            return
        self._by_address.pop(entry.card.address, None)
        self._remembered[entry.card.model] = entry.heard_at
        self.version += 1
        if not entry.stuck:  # a stuck one has left already
            yield Left(engine_id, reason, graceful)


def _card(beat: Beat) -> EngineCard:
    return EngineCard(
        engine_id=beat.engine_id,
        role=Role(beat.role),
        model=beat.model,
        tokenizer=beat.tokenizer,
        address=beat.grpc_address,
        locator=beat.locator,
        identity=tuple(sorted(beat.identity.items())),
        max_model_len=beat.max_model_len,
        block_size=beat.block_size,
        total_kv_tokens=beat.total_kv_tokens,
        vocab_size=beat.vocab_size,
        layout=beat.layout,
    )
