"""How much of the matrix a run has played, over all its workers, and what of it held."""

from collections.abc import Iterable

import pytest

from tests.matrix import cells
from tests.matrix.faults import Fault
from tests.matrix.phases import Phase

_CASES = "tests/matrix/test_matrix.py::test_cell["
AGAIN = "matrix.again"
"""Property of a case's report: the times that it had to be set up anew."""


class Played:
    """A plugin of the process that hears every report: the only one, or the one above the workers."""

    def __init__(self) -> None:
        self._chosen: set[str] = set()
        self._heard: set[str] = set()
        self._bad: set[str] = set()
        self._again = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers: what is left after all choosing."""
        self._choose(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Iterable[str]) -> None:
        """With workers: each has collected the same."""
        self._choose(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One part of a test. A worker that dies under a case reports it as failed."""
        if not _is_case(report.nodeid):
            return
        if report.failed:  # before it or after it, too: the fleet was not, or did not become, whole
            self._bad.add(report.nodeid)
        if report.failed or (report.when == "call" and report.passed):
            self._heard.add(report.nodeid)
        if report.when == "call":
            self._again += sum(1 for name, _ in report.user_properties if name == AGAIN)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A case that was chosen and not played fails the run, whatever the reason."""
        if self._missing() and session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The line that says it."""
        if not (self._chosen or self._heard) or terminalreporter.config.option.collectonly:
            return
        played, held, missing = len(self._heard), len(self._heard - self._bad), self._missing()
        terminalreporter.write_line(
            f"matrix: {len(Phase)} phases x {len(Fault)} faults x {len(cells.MODES)} modes, {played} cases, {held} held"
        )
        if missing:
            terminalreporter.write_line(f"matrix: {len(missing)} cases were NOT PLAYED:")
            for nodeid in missing:
                terminalreporter.write_line(f"  {nodeid}")
        if self._again:
            terminalreporter.write_line(f"matrix: {self._again} cases were set up anew: a beat came late")
        impossible = [why for cell in cells.every() if (why := cells.cannot(cell))]
        terminalreporter.write_line(f"matrix: {len(impossible)} cells cannot happen:")
        for why in dict.fromkeys(impossible):
            terminalreporter.write_line(f"  {impossible.count(why):4} {why}")

    def _choose(self, ids: Iterable[str]) -> None:
        self._chosen.update(nodeid for nodeid in ids if _is_case(nodeid))

    def _missing(self) -> list[str]:
        return sorted(self._chosen - self._heard)


def _is_case(nodeid: str) -> bool:
    return _CASES in nodeid
