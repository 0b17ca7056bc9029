"""Named deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvd.timers import Timers


def test_due_ones_come_once_earliest_first() -> None:
    """pop_due gives each due key once, in the order of time, and none that is not due."""
    timers: Timers[str] = Timers()
    timers.set("b", 2.0)
    timers.set("a", 1.0)
    timers.set("c", 3.0)
    assert [timers.pop_due(2.0), timers.pop_due(2.0), timers.pop_due(2.0)] == ["a", "b", None]
    assert timers.next() == 3.0


def test_a_moved_or_cleared_deadline_does_not_fire_at_its_old_time() -> None:
    """Moving and clearing leave nothing behind."""
    timers: Timers[str] = Timers()
    timers.set("moved", 1.0)
    timers.set("gone", 1.0)
    timers.set("moved", 5.0)
    timers.clear("gone")
    timers.clear("never was")
    assert timers.pop_due(4.0) is None
    assert timers.pop_due(5.0) == "moved"
    assert timers.next() is None


def test_postponed_deadlines_keep_their_order() -> None:
    """All later by as much; cleared ones stay away, later ones are set as ever."""
    timers: Timers[str] = Timers()
    for key, when in (("b", 2.0), ("a", 1.0), ("gone", 1.5)):
        timers.set(key, when)
    timers.clear("gone")
    timers.postpone(10.0)
    timers.set("c", 11.5)
    assert timers.pop_due(10.9) is None
    assert [timers.pop_due(20.0) for _ in range(4)] == ["a", "c", "b", None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 50))), max_size=400))
def test_agrees_with_a_dict(actions: list[tuple[str, int | None]]) -> None:
    """Against a plain dict as the model, over many renewals (which compact the heap)."""
    timers: Timers[str] = Timers()
    model: dict[str, float] = {}
    for key, when in actions:
        if when is None:
            timers.clear(key)
            model.pop(key, None)
        else:
            timers.set(key, float(when))
            model[key] = float(when)
        assert timers.next() == min(model.values(), default=None)
        assert len(timers) == len(model)
    popped = []
    while (key_or_none := timers.pop_due(100.0)) is not None:
        popped.append(key_or_none)
    assert sorted(popped) == sorted(model)
