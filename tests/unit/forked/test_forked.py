"""Forked processes are like others, and each order gets its own answer."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked.forks import Zygote

KIND = "tests.unit.forked.kind"


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    """One that has imported its children."""
    made = Zygote(KIND)
    yield made
    made.close()


class Words:
    """What a child says, over a pipe that ends with it."""

    def __init__(self) -> None:
        ours, theirs = os.pipe()
        self._ours, self._theirs = os.fdopen(ours), os.fdopen(theirs, "w")
        self.fd = theirs
        """For the child."""

    def first(self) -> str:
        """The first word."""
        return self._ours.read(1)

    def rest(self) -> str:
        """Until the child has ended."""
        self._theirs.close()
        return self._ours.read()

    def close(self) -> None:
        """Nobody listens any more."""
        self._theirs.close()
        self._ours.close()


def called(pid: int) -> list[str]:
    """A process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


Listen = Callable[[], Words]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Makes the words of one child."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Words()))


async def test_a_child_has_its_arguments_descriptors_and_status(zygote: Zygote, listen: Listen) -> None:
    """Of two at once, each its own; asked twice, the status is the same."""
    words = listen(), listen()
    both = [
        zygote.fork(["say", name], os.environ, each.fd, [0] * count)
        for count, (name, each) in enumerate(zip(("one", "two"), words, strict=True))
    ]
    assert [await child.wait(10) for child in both] == [3, 3]
    assert [await child.wait(10) for child in both] == [3, 3]
    assert [each.rest() for each in words] == ["one 0\n", "two 1\n"]


async def test_a_child_is_found_by_its_command_line_and_dies_of_a_signal(zygote: Zygote, listen: Listen) -> None:
    """As any process; signals behind its end are nothing."""
    words = listen()
    child = zygote.fork(["wait"], os.environ, words.fd)
    assert words.first() == "w"
    assert called(child.pid) == ["a-child", "wait"]
    assert child.alive
    child.signal(signal.SIGKILL)
    assert await child.wait(10) == -signal.SIGKILL
    assert not child.alive
    child.signal(signal.SIGKILL)
    child.close()


@pytest.mark.parametrize(("how", "status", "said"), [("leave", 0, ""), ("break", 1, "no such child: break")])
async def test_how_a_child_leaves_is_its_status(
    zygote: Zygote, listen: Listen, how: str, status: int, said: str
) -> None:
    """sys.exit() without a number is success; what nobody caught is told, and is 1."""
    words = listen()
    assert await zygote.fork([how], os.environ, words.fd).wait(10) == status
    assert said in words.rest()


async def test_an_answer_that_comes_too_late_is_nobody_elses(zygote: Zygote, listen: Listen) -> None:
    """An order is given up: the next one gets its own child, and the late one is killed."""
    late, words = listen(), listen()
    assert await zygote.fork(["leave"], os.environ, words.fd).wait(10) == 0
    assert zygote.pid is not None
    os.kill(zygote.pid, signal.SIGSTOP)
    zygote.patience(0.01)
    with pytest.raises(TimeoutError):
        zygote.fork(["wait"], os.environ, late.fd)
    zygote.patience(20)
    os.kill(zygote.pid, signal.SIGCONT)
    assert await zygote.fork(["say", "mine"], os.environ, words.fd).wait(10) == 3
    assert words.rest() == "mine 0\n"
    assert late.rest() in ("", "waits\n"), "and it has ended"


async def test_a_zygote_that_has_died_is_said(zygote: Zygote, listen: Listen) -> None:
    """Every order says so; none waits."""
    words = listen()
    assert await zygote.fork(["leave"], os.environ, words.fd).wait(10) == 0
    assert zygote.pid is not None
    os.kill(zygote.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(OSError, match=r"ended|pipe|reset"):
            zygote.fork(["leave"], os.environ, words.fd)
