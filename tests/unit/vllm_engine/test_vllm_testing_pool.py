"""The pool that tests on vLLM share engines by, with engines that are none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.engine.vllm.testing_pool import EngineKind, EnginePool, Member
from pdserve.rpc.errors import EngineDied


class Fake:
    """An engine and its host at once."""

    def __init__(self, kind: EngineKind) -> None:
        self.kind = kind
        self.attachment = self
        self.contradicted: list[str] = []
        self.ended = 0

    async def aclose(self) -> None:
        """Called for the host and for the engine."""
        self.ended += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    """All engines that were started, in order; those of a model `broken` do not start."""
    fakes: list[Fake] = []

    async def start(kvd: Any, kind: EngineKind) -> Member:
        if kind.model.name == "broken":
            raise EngineDied("it does not start")
        fakes.append(Fake(kind))
        return Member(cast("Any", fakes[-1]), cast("Any", fakes[-1]))

    monkeypatch.setattr(Member, "start", start)
    return fakes


@pytest.fixture
def pool() -> Callable[[int], EnginePool]:
    """`pool(most)`."""
    return lambda most: EnginePool(cast("Any", None), most)


A, B, C = (EngineKind(Path("model"), (), core) for core in range(3))


async def ask(pool: EnginePool, kind: EngineKind) -> Fake:
    """Holds an engine and lets it go."""
    async with pool.engine(kind) as engine:
        return cast("Fake", engine)


async def test_equal_kinds_are_one_engine(pool: Callable[[int], EnginePool], started: list[Fake]) -> None:
    """Twins differ in their core; all are ended at the end, their hosts too."""
    ours = pool(3)
    again = EngineKind(Path("model"), (), 0)
    assert await ask(ours, A) is await ask(ours, again)
    assert await ask(ours, B) is not await ask(ours, A)
    assert [fake.kind for fake in started] == [A, B]
    await ours.aclose()
    assert [fake.ended for fake in started] == [2, 2]


async def test_what_was_asked_for_longest_ago_makes_room(
    pool: Callable[[int], EnginePool], started: list[Fake]
) -> None:
    """The third of two: the one that was not asked for since is ended, and is started anew when it is."""
    ours = pool(2)
    a, b = await ask(ours, A), await ask(ours, B)
    assert await ask(ours, A) is a
    await ask(ours, C)
    assert (a.ended, b.ended) == (0, 2)
    assert await ask(ours, B) is not b


async def test_what_is_held_is_not_ended(pool: Callable[[int], EnginePool], started: list[Fake]) -> None:
    """Not even where there are too many."""
    ours = pool(1)
    async with ours.engine(A) as a:
        b = await ask(ours, B)
        await ask(ours, C)
        assert (cast("Fake", a).ended, b.ended) == (0, 2)


async def test_an_engine_that_does_not_start_says_why(pool: Callable[[int], EnginePool], started: list[Fake]) -> None:
    """Its twin that did start is kept, and ended at the end."""
    ours = pool(2)
    broken = EngineKind(Path("broken"), ())
    with pytest.raises(EngineDied, match="does not start"):
        async with ours.pair(A, broken):
            raise AssertionError("there is no pair")
    assert (await ask(ours, A)).ended == 0
    assert len(started) == 1
    await ours.aclose()
    assert started[0].ended == 2


async def test_what_a_failure_may_have_spoilt_is_not_used_again(
    pool: Callable[[int], EnginePool], started: list[Fake]
) -> None:
    """The engines that were held are ended; others stay."""
    ours = pool(3)
    a, b = await ask(ours, A), await ask(ours, B)
    with pytest.raises(ZeroDivisionError):
        async with ours.engine(A):
            raise ZeroDivisionError
    assert (a.ended, b.ended) == (2, 0)
    assert await ask(ours, A) is not a
    assert await ask(ours, B) is b
