"""A comparison in the report: how its objectives came about, and every table of the terminal. Pure."""

from collections.abc import Sequence

from pdserve.bench.compare import objectives
from pdserve.bench.compare.folder import State
from pdserve.bench.compare.sections import Section
from pdserve.bench.compare.settings import Settings
from pdserve.bench.report.chapter import Chapter
from pdserve.bench.report.picture import Table


def chapter(settings: Settings, state: State, found: Sequence[Section]) -> Chapter:
    """`found`: the sections of what was measured."""
    said = []
    if state.calibration is not None:
        said.append(f"{objectives.words(state.calibration)}.")
        if caution := objectives.caution(state.calibration, settings.threshold):
            said.append(f"CAUTION: {caution}.")
    if state.budget is not None:
        said.append(f"The tuned pair (e) has a token budget of {state.budget}{_tried(state)}.")
    said.append(
        "Every ratio is named by what it divides and where. Outside of the tried rates nothing is assumed: there a "
        "goodput or a ratio is a bound, or unknown."
    )
    tables = tuple((one.heading, Table(one.columns, one.rows) if one.columns else None, one.lines) for one in found)
    return Chapter("All configurations against each other", tuple(said), tables)


def _tried(state: State) -> str:
    if not state.trials:
        return ""
    each = ", ".join(
        f"{one.budget}: {one.attainment:.0%}, of the ITL alone {one.itl_attainment:.0%}" for one in state.trials
    )
    return f", of those that were tried ({each})"
