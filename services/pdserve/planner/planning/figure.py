"""A plan as a picture."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.bench.report.words import objective
from pdserve.planner.planning import verdict
from pdserve.planner.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLIT, _COLOCATED, _CHOSEN = "#0068ad", "#d4660a", "#1b1e23"
_TITLE = 120
"""Characters of a line of the picture's title, as many as fit."""
_NARROW = 4.2
"""Inches: the width of a picture for a phone, at which its words are as large there as they are meant."""


def png(plan: Plan, *, titled: bool = True, narrow: bool = False) -> bytes:
    """Attainment of every way, with the interval of those that have one, and their median TTFT beside the SLO.

    `narrow`: one below the other, for a phone.
    """
    from matplotlib.figure import Figure

    shown = plan.screened.all
    names = [one.candidate.label for one in shown]
    colours = [_COLOCATED if one.candidate.colocated else _SPLIT for one in shown]
    high = 1.6 + 0.42 * len(shown)
    figure = Figure(figsize=(_NARROW, 2 * high) if narrow else (10, high), layout="constrained")
    left, right = figure.subplots(2, 1, sharey=True) if narrow else figure.subplots(1, 2, sharey=True)
    places = range(len(shown))
    free = plan.question.slo.empty
    left.barh(places, [one.score if free else 100 * one.attainment for one in shown], color=colours, height=0.6)
    known = ((plan.best, plan.attainment), (plan.opponent, plan.opponent_attainment))
    for one, interval in () if free else known:
        if one is not None and interval is not None:
            place = shown.index(one)
            left.plot([100 * interval.low, 100 * interval.high], [place, place], color=_CHOSEN, linewidth=2, marker="|")
    if not free:
        left.set_xlim(0, 100)
    left.set_xlabel("requests a second" if free else "requests that meet every objective, %")
    left.set_yticks(list(places), names)
    left.invert_yaxis()
    left.get_yticklabels()[shown.index(plan.best)].set_fontweight("bold")
    _latencies(right, plan, places)
    columns = 2 if narrow else 4
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower right", ncols=columns, fontsize=8, frameon=False
    )
    if titled:
        title = textwrap.fill(verdict.answer(plan).removeprefix("-> "), _TITLE)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120, metadata={"Software": ""})
    return target.getvalue()


def _latencies(axes: "Axes", plan: Plan, places: Sequence[int]) -> None:
    shown, slo = plan.screened.all, plan.question.slo
    axes.plot([one.mean("ttft") * 1000 for one in shown], places, "o", color=_CHOSEN, label="TTFT, median")
    axes.plot([one.mean("itl") * 1000 for one in shown], places, "s", color="#00806a", label="ITL, median")
    for most, style, name in ((slo.ttft, "-", "TTFT"), (slo.itl, "--", "ITL")):
        if most is not None:
            label = f"{name} SLO {objective(most)}"
            axes.axvline(most * 1000, color="#b3261e", linestyle=style, linewidth=1, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.4g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="#e6e6e1")
