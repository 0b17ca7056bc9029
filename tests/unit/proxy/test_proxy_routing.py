"""Choosing engines: equal identities, room, least load, and named reasons where there is no choice."""

from typing import Any

import pytest

from pdserve.proxy.credits import Ledger
from pdserve.proxy.registry import Entry
from pdserve.proxy.routing import Choice, Need, Router, unpaired_because
from pdserve.proxy.types import EngineCard, Role, Route
from pdserve.rpc.errors import IncompatibleEngines, NoEngines

NEED = Need(prompt=32, answer=16, headroom=16)


def entry(engine_id: str, role: Role, **changes: Any) -> Entry:
    """A routable engine."""
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "role": role,
        "model": "m",
        "tokenizer": "bytes",
        "address": engine_id,
        "locator": b"",
        "identity": (("kv_dtype", "bf16"),),
        "max_model_len": 512,
        "block_size": 16,
        "total_kv_tokens": 1024,
    }
    waiting = changes.pop("waiting", 0)
    return Entry(EngineCard(**(fields | changes)), False, 0, 0, waiting, 0, 1, 0.0, connected=True)


def router(*entries: Entry) -> tuple[Router, Ledger]:
    """A router whose ledger knows the engines."""
    ledger = Ledger()
    for one in entries:
        ledger.joined(one.card)
    return Router(ledger), ledger


def ids(choice: Choice | None) -> tuple[str, str] | None:
    """Prefill's and decode's id."""
    return (choice.prefill.engine_id if choice.prefill else "", choice.decode.engine_id) if choice else None


def none_missed(_: Entry) -> int:
    """All beats are there."""
    return 0


P1, P2 = entry("p1", Role.PREFILL), entry("p2", Role.PREFILL)
D1, D2 = entry("d1", Role.DECODE), entry("d2", Role.DECODE)
BOTH = entry("b", Role.BOTH)


def test_the_least_loaded_pair_wins() -> None:
    """Each side on its own: what is reserved, then what waits, then whose turn it is."""
    chooser, ledger = router(P1, P2, D1, D2)
    ledger.reserve("p1", 16)
    ledger.reserve("d2", 16)
    assert ids(chooser.choose([P1, P2, D1, D2], NEED, Route.SPLIT, none_missed)) == ("p2", "d1")


def test_idle_engines_take_turns() -> None:
    """Equal loads: the one that was not used last."""
    chooser, ledger = router(P1, P2, D1)
    chosen = []
    for _ in range(4):
        choice = chooser.choose([P1, P2, D1], NEED, Route.SPLIT, none_missed)
        assert choice is not None
        assert choice.prefill is not None
        chosen.append(choice.prefill.engine_id)
        ledger.reserve(choice.prefill.engine_id, 16).release()
    assert chosen == ["p1", "p2", "p1", "p2"]


def test_a_suspect_is_the_last_choice() -> None:
    """An engine that owes a beat is taken only where no other has room."""
    chooser, ledger = router(P1, P2, D1)
    held = ledger.reserve("p2", 900)

    def missed(one: Entry) -> int:
        return int(one is P1)

    assert ids(chooser.choose([P1, P2, D1], NEED, Route.SPLIT, missed)) == ("p2", "d1")
    ledger.reserve("p2", 100)
    assert ids(chooser.choose([P1, P2, D1], NEED, Route.SPLIT, missed)) == ("p1", "d1")
    held.release()


def test_only_equal_identities_are_paired() -> None:
    """The least loaded engines are passed over where they may not exchange KV."""
    other = entry("d3", Role.DECODE, identity=(("kv_dtype", "fp8"),))
    chooser, ledger = router(P1, D1, other)
    ledger.reserve("d1", 512)
    assert ids(chooser.choose([P1, D1, other], NEED, Route.SPLIT, none_missed)) == ("p1", "d1")


def test_incompatible_engines_are_named_with_what_differs() -> None:
    """The error and the topology both say which property differs."""
    other = entry("d3", Role.DECODE, identity=(("kv_dtype", "fp8"), ("ranks", "2")))
    chooser, _ = router(P1, other)
    with pytest.raises(IncompatibleEngines, match="kv_dtype: bf16 != fp8; ranks: absent != 2") as caught:
        chooser.candidates([P1, other], Route.SPLIT)
    assert caught.value.metadata == {"kv_dtype": "bf16 != fp8", "ranks": "absent != 2"}
    assert unpaired_because(P1, [P1, other]).startswith("no decode engine shares its identity: kv_dtype")
    assert unpaired_because(P1, [P1]) == "no decode engine for m"
    assert unpaired_because(P1, [P1, D1, other]) == ""
    assert unpaired_because(BOTH, [BOTH]) == ""


@pytest.mark.parametrize(
    ("engines", "route", "said"),
    [
        ([], Route.SPLIT, "no prefill and decode pair .* 0 prefill, 0 decode, 0 both"),
        ([P1], Route.SPLIT, "1 prefill, 0 decode"),
        ([P1, BOTH], Route.SPLIT, "1 prefill, 0 decode, 1 both"),
        ([P1, D1], Route.COLOCATED, "no colocated engine"),
        ([P1], Route.SPLIT_OR_COLOCATED, "no engine"),
    ],
)
def test_missing_engines_are_counted_by_role(engines: list[Entry], route: Route, said: str) -> None:
    """NO_ENGINES says what there is, so that an operator sees what is missing."""
    chooser, _ = router(*engines)
    with pytest.raises(NoEngines, match=said):
        chooser.candidates(engines, route)


def test_colocated_only_where_asked_for() -> None:
    """Split never falls back by itself; split_or_colocated does where no pair has room."""
    chooser, ledger = router(P1, D1, BOTH)
    every = [P1, D1, BOTH]
    assert ids(chooser.choose(every, NEED, Route.COLOCATED, none_missed)) == ("", "b")
    assert ids(chooser.choose(every, NEED, Route.SPLIT_OR_COLOCATED, none_missed)) == ("p1", "d1")
    ledger.reserve("d1", 1024)
    assert chooser.choose(every, NEED, Route.SPLIT, none_missed) is None
    assert ids(chooser.choose(every, NEED, Route.SPLIT_OR_COLOCATED, none_missed)) == ("", "b")


def test_credits_are_asked_of_both_sides() -> None:
    """A prompt that fits prefill but not decode waits, and the other way round."""
    chooser, ledger = router(P1, D1)
    held = ledger.reserve("d1", 1024 - 47)
    assert chooser.choose([P1, D1], NEED, Route.SPLIT, none_missed) is None
    held.release()
    held = ledger.reserve("d1", 1024 - 48)
    assert ids(chooser.choose([P1, D1], NEED, Route.SPLIT, none_missed)) == ("p1", "d1")
    ledger.reserve("p1", 1024 - 31)
    assert chooser.choose([P1, D1], NEED, Route.SPLIT, none_missed) is None


def test_needs_are_whole_blocks_and_never_more_than_a_pool() -> None:
    """n answers hold n times; a lone request that needs more than the pool gets the pool, not a deadlock."""
    need = Need(prompt=33, answer=400, n=2, headroom=100)
    assert need.of_prefill(P1.card) == 48
    assert need.of_decode(D1.card) == 2 * 144
    assert Need(prompt=500, answer=10, n=16, headroom=10).of_decode(D1.card) == 1024


def test_what_an_empty_engine_cannot_hold_is_no_choice() -> None:
    """Engines of different size in one class: only those that can ever hold it."""
    small = entry("d3", Role.DECODE, max_model_len=40)
    chooser, _ = router(P1, D1, small)
    for _ in range(3):
        assert ids(chooser.choose([P1, small, D1], NEED, Route.SPLIT, none_missed)) == ("p1", "d1")
    assert chooser.choose([P1, small], NEED, Route.SPLIT, none_missed) is None


def test_excluded_engines_are_not_chosen() -> None:
    """A retry goes elsewhere; to compute again any engine that decodes will do, but no prefill engine."""
    chooser, _ = router(P1, P2, D1, D2, BOTH)
    every = [P1, P2, D1, D2, BOTH]
    assert ids(chooser.choose(every, NEED, Route.SPLIT, none_missed, {"p1", "d1"})) == ("p2", "d2")
    assert chooser.choose(every, NEED, Route.SPLIT, none_missed, {"p1", "p2"}) is None
    assert ids(chooser.choose_decode(every, NEED, none_missed, {"d1", "d2"})) == ("", "b")
    assert chooser.choose_decode([P1, P2], NEED, none_missed) is None
