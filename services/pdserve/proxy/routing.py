"""Which engines serve a request. Pure: engines and credits in, a choice or a named reason out.

Engines that may exchange KV have equal identities and form a class, whatever their layouts. In each class the
least loaded prefill engine and the least loaded decode engine that fit are a pair; the least loaded pair wins.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.proxy.credits import Ledger, blocks_round_up
from pdserve.proxy.registry import Entry
from pdserve.proxy.types import EngineCard, Role, Route
from pdserve.rpc.errors import IncompatibleEngines, KvdUnavailable, NoEngines, PdserveError


def room(card: EngineCard) -> int:
    """Tokens of the longest prompt and answer that an engine can hold when it is empty."""
    return min(card.max_model_len, card.total_kv_tokens)


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of the pools, in tokens."""

    prompt: int
    answer: int
    """Most tokens of one answer."""
    n: int = 1
    headroom: int = 0
    """Of each answer, reserved at dispatch: the rest is left to the engine's own preemption."""

    def of_prefill(self, card: EngineCard) -> int:
        """To reserve on a prefill engine; at most its pool, so that a lone request is never stuck."""
        return min(blocks_round_up(self.prompt, card.block_size), card.total_kv_tokens)

    def of_decode(self, card: EngineCard) -> int:
        """To reserve on the engine that answers."""
        one = blocks_round_up(self.prompt + min(self.answer, self.headroom), card.block_size)
        return min(self.n * one, card.total_kv_tokens)

    def can_prefill(self, card: EngineCard) -> bool:
        """Whether an empty engine could."""
        return self.prompt < card.max_model_len and self.prompt <= card.total_kv_tokens

    def can_decode(self, card: EngineCard) -> bool:
        """Whether an empty engine could."""
        return self.prompt + self.answer <= room(card)


@dataclass(frozen=True, slots=True)
class Choice:
    """The engines of one attempt."""

    prefill: EngineCard | None
    """None: the decode engine computes the prompt."""
    decode: EngineCard


MissedBeats = Callable[[Entry], int]
"""How many beats an engine owes now."""


class Router:
    """Chooses by identity and least load."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def candidates(self, engines: Sequence[Entry], route: Route, exclude: Collection[str] = ()) -> list[Choice]:
        """What could serve if it were empty: the roomiest engines of each class.

        Raises:
            NoEngines: no pair, or no colocated engine, under this route.
            IncompatibleEngines: prefill and decode engines, but none that share an identity.
            KvdUnavailable: pairs, but the kvds of all drain.
        """
        found: list[Choice] = []
        left = [entry for entry in engines if entry.card.engine_id not in exclude]
        if route is not Route.COLOCATED:
            for prefills, decodes in _classes(left):
                found.append(Choice(_roomiest(prefills), _roomiest(decodes)))
        if route is not Route.SPLIT and (alone := [e for e in left if e.card.role is Role.BOTH]):
            found.append(Choice(None, _roomiest(alone)))
        if not found:
            raise why_none(left, route)
        return found

    def alone(self, engines: Sequence[Entry]) -> list[Choice]:
        """What could compute a prompt and answer it, with no prefill leg, if it were empty.

        Raises:
            NoEngines: prefill engines at most.
        """
        able = [entry for entry in engines if entry.card.role is not Role.PREFILL]
        if not able:
            raise NoEngines("no decode engine can be routed to")
        return [Choice(None, _roomiest(able))]

    def choose(
        self,
        engines: Sequence[Entry],
        need: Need,
        route: Route,
        missed: MissedBeats,
        exclude: Collection[str] = (),
    ) -> Choice | None:
        """The least loaded choice with credits for `need`; None where there is none now."""
        left = [entry for entry in engines if entry.card.engine_id not in exclude]
        best: tuple[tuple[float, ...], Choice] | None = None
        if route is not Route.COLOCATED:
            for prefills, decodes in _classes(left):
                p = self._least(prefills, need, missed, prefill=True)
                d = self._least(decodes, need, missed, prefill=False)
                if p is None or d is None:
                    continue
                load = tuple(a + b for a, b in zip(p[0], d[0], strict=True))
                if best is None or load < best[0]:
                    best = load, Choice(p[1], d[1])
        if best is None and route is not Route.SPLIT:
            alone = self._least([e for e in left if e.card.role is Role.BOTH], need, missed, prefill=False)
            if alone is not None:
                best = alone[0], Choice(None, alone[1])
        return best[1] if best else None

    def choose_decode(
        self, engines: Sequence[Entry], need: Need, missed: MissedBeats, exclude: Collection[str] = ()
    ) -> Choice | None:
        """The least loaded engine that can answer with no prefill leg, to compute a prompt again."""
        able = [e for e in engines if e.card.role is not Role.PREFILL and e.card.engine_id not in exclude]
        least = self._least(able, need, missed, prefill=False)
        return Choice(None, least[1]) if least else None

    def _least(
        self, entries: Iterable[Entry], need: Need, missed: MissedBeats, *, prefill: bool
    ) -> tuple[tuple[float, ...], EngineCard] | None:
        best: tuple[tuple[float, ...], EngineCard] | None = None
        for entry in entries:
            card = entry.card
            if not (need.can_prefill(card) if prefill else need.can_decode(card)):
                continue
            available = self._ledger.available(card.engine_id)
            if (need.of_prefill(card) if prefill else need.of_decode(card)) > available:
                continue
            load = (
                float(min(missed(entry), 1)),
                1.0 - available / card.total_kv_tokens,
                float(self._ledger.legs(card.engine_id) + entry.waiting),
                float(self._ledger.last_used(card.engine_id)),  # idle engines take turns
            )
            if best is None or load < best[0]:
                best = load, card
        return best


def why_none(engines: Sequence[Entry], route: Route) -> PdserveError:
    """The error that says by name what is missing among the routable engines of a model."""
    roles = {role: [e for e in engines if e.card.role is role] for role in Role}
    counts = ", ".join(f"{len(found)} {role.value}" for role, found in roles.items())
    drain = [entry for entry in engines if entry.kvd_draining]
    if route is not Route.COLOCATED and _classes(engines, handing_over=False) and drain:
        whose = ", ".join(f"{e.card.role.value} engine {e.card.engine_id}" for e in drain)
        return KvdUnavailable(f"kvd drains and takes no new transfers: of {whose}")
    if route is not Route.COLOCATED and roles[Role.PREFILL] and roles[Role.DECODE]:
        ours, theirs = roles[Role.PREFILL][0].card, roles[Role.DECODE][0].card
        differs = identity_difference(ours, theirs)
        said = f"{_said(differs)}; {_layouts(ours, theirs)}"
        return IncompatibleEngines(f"no prefill and decode engine may exchange KV: {said}", **differs)
    wanted = "no prefill and decode pair" if route is Route.SPLIT else "no engine"
    if route is Route.COLOCATED:
        wanted = "no colocated engine"
    return NoEngines(f"{wanted} can be routed to for route {route.value}: {counts}", route=route.value)


def identity_difference(prefill: EngineCard, decode: EngineCard) -> dict[str, str]:
    """What differs, as `{name: "prefill's != decode's"}`."""
    ours, theirs = dict(prefill.identity), dict(decode.identity)
    pairs = {name: (ours.get(name, "absent"), theirs.get(name, "absent")) for name in sorted({*ours, *theirs})}
    return {name: f"{p} != {d}" for name, (p, d) in pairs.items() if p != d}


def unpaired_because(entry: Entry, engines: Sequence[Entry]) -> str:
    """Why a prefill or decode engine takes part in no hand-over; empty where it does, or needs none."""
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(entry.card.role)
    if other is None:
        return ""
    if entry.kvd_draining:
        return "its kvd drains: no hand-over is begun with it"
    partners = [e.card for e in engines if e.card.role is other and e.card.model == entry.card.model]
    if not partners:
        return f"no {other.value} engine for {entry.card.model}"
    if any(card.identity == entry.card.identity for card in partners):
        return ""
    ours, theirs = entry.card, partners[0]
    differs = _said(identity_difference(ours, theirs))
    return f"no {other.value} engine shares its identity: {differs}; {_layouts(ours, theirs)}"


def _said(differs: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in differs.items())


def _layouts(ours: EngineCard, theirs: EngineCard) -> str:
    """Both layouts, for whoever wants to make them fit."""
    return "; ".join(f"{card.role.value}: {card.layout or 'a layout not told'}" for card in (ours, theirs))


def _roomiest(entries: Iterable[Entry]) -> EngineCard:
    return max((entry.card for entry in entries), key=room)


def _classes(engines: Iterable[Entry], *, handing_over: bool = True) -> list[tuple[list[Entry], list[Entry]]]:
    """Prefill and decode engines of each identity that has both. `handing_over`: only those whose kvd takes new
    transfers."""
    classes: dict[tuple[tuple[str, str], ...], tuple[list[Entry], list[Entry]]] = {}
    for entry in engines:
        role = entry.card.role
        if role is Role.BOTH or (handing_over and entry.kvd_draining):
            continue
        prefills, decodes = classes.setdefault(entry.card.identity, ([], []))
        (prefills if role is Role.PREFILL else decodes).append(entry)
    return [pair for pair in classes.values() if pair[0] and pair[1]]
