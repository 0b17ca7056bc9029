"""A plan as a picture and as one HTML page that needs nothing else."""

import base64
import html
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.planner.plain import seconds
from pdserve.planner.planning import verdict, words
from pdserve.planner.planning.decision import Plan
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLIT, _COLOCATED, _CHOSEN = "#0068ad", "#d4660a", "#1b1e23"
_TITLE = 120
"""Characters of a line of the picture's title, as many as fit."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1e23 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .2rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 1px solid #b9bab4 }
img { max-width: 100% } pre { white-space: pre-wrap; background: #f4f4f1; padding: 1rem }
"""


def write(plan: Plan, path: Path) -> None:
    """`.png`: the picture; `.html`: the page with it, the words and the table.

    Raises:
        ConfigError: another ending, or the file cannot be written.
    """
    check(path)
    try:
        path.write_bytes(png(plan) if path.suffix == ".png" else page(plan).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def check(path: Path) -> None:
    """Raises ConfigError for another ending, or a folder that is not there."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"{path}: a report is a .html or a .png file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")


def png(plan: Plan) -> bytes:
    """Attainment of every way, with the interval of those that have one, and their median TTFT beside the SLO."""
    from matplotlib.figure import Figure

    shown = plan.screened.all
    names = [one.candidate.label for one in shown]
    colours = [_COLOCATED if one.candidate.colocated else _SPLIT for one in shown]
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
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
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    title = textwrap.fill(verdict.answer(plan).removeprefix("-> "), _TITLE)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120, metadata={"Software": ""})
    return target.getvalue()


def _latencies(axes: "Axes", plan: Plan, places: Sequence[int]) -> None:
    shown, slo = plan.screened.all, plan.question.slo
    axes.plot([one.mean("ttft") * 1000 for one in shown], places, "o", color=_CHOSEN, label="TTFT, median")
    axes.plot([one.mean("itl") * 1000 for one in shown], places, "s", color="#00806a", label="ITL, median")
    for most, style in ((slo.ttft, "-"), (slo.itl, "--")):
        if most is not None:
            axes.axvline(most * 1000, color="#b3261e", linestyle=style, linewidth=1, label=f"SLO {seconds(most)}")
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="#e6e6e1")


def page(plan: Plan) -> str:
    """The page."""
    picture = base64.b64encode(png(plan)).decode()
    names, *ways = words.table(plan)
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in ways)
    said = html.escape(words.report(plan))
    title = html.escape(verdict.answer(plan).removeprefix("-> "))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan: {title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{html.escape(words.question(plan))}</p>"
        f'<img src="data:image/png;base64,{picture}" alt="{title}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><pre>{said}</pre></body></html>\n"
    )
