"""The line that a run ends with counts what was played; fake: the reports."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.matrix.played import AGAIN, Played

When = Literal["setup", "call", "teardown"]
Outcome = Literal["passed", "failed", "skipped"]
_NAMES = ("held", "fails", "unclean", "skipped", "lost")
_IDS = [f"tests/matrix/test_matrix.py::test_cell[{name}]" for name in _NAMES]


def report(nodeid: str, when: When, outcome: Outcome, **more: Any) -> pytest.TestReport:
    """Of one part of a case."""
    return pytest.TestReport(nodeid, ("", 0, ""), {}, outcome, None, when, **more)


def ended(played: Played, *, status: int = 0) -> tuple[int, list[str]]:
    """The exit status of the run, and what it says."""
    session: Any = SimpleNamespace(
        exitstatus=pytest.ExitCode(status), config=SimpleNamespace(option=SimpleNamespace(collectonly=False))
    )
    said: list[str] = []
    reporter: Any = SimpleNamespace(write_line=said.append, config=session.config)
    played.pytest_sessionfinish(session)
    played.pytest_terminal_summary(reporter)
    return int(session.exitstatus), said


def test_what_was_not_played_is_named_and_fails_the_run() -> None:
    """A case that was lost and one that was skipped; one that left its fleet in disorder has not held."""
    played = Played()
    for _ in range(2):  # of two workers, that collect the same
        played.pytest_xdist_node_collection_finished(None, [*_IDS, "tests/matrix/test_docs.py::test_other"])
    outcomes: tuple[Outcome, ...] = ("passed", "failed", "passed", "skipped")
    for nodeid, outcome in zip(_IDS, outcomes, strict=False):
        played.pytest_runtest_logreport(report(nodeid, "setup", "passed"))
        played.pytest_runtest_logreport(report(nodeid, "call", outcome))
        played.pytest_runtest_logreport(report(nodeid, "teardown", "failed" if "unclean" in nodeid else "passed"))
    status, said = ended(played)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert said[0].endswith("modes, 3 cases, 1 held")
    assert said[1:4] == ["matrix: 2 cases were NOT PLAYED:", f"  {_IDS[4]}", f"  {_IDS[3]}"]


def test_a_whole_run_says_so_and_stays_green() -> None:
    """And how often a case was set up anew, which its reports carry."""
    played = Played()
    played.pytest_collection_finish(SimpleNamespace(items=[SimpleNamespace(nodeid=_IDS[0])]))  # type: ignore[arg-type]
    played.pytest_runtest_logreport(report(_IDS[0], "call", "passed", user_properties=[(AGAIN, 2)]))
    status, said = ended(played)
    assert status == pytest.ExitCode.OK
    assert said[0].endswith("modes, 1 cases, 1 held")
    assert said[1] == "matrix: 1 cases were set up anew: a beat came late"
    assert "NOT PLAYED" not in "".join(said)
