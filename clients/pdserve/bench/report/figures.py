"""The drawing surface: the one file that knows matplotlib. Measures in CSS pixels; saves as SVG text and as PNG.

The same input gives the same bytes: no dates, ids from a fixed salt.
"""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from pdserve.bench.report import palette
from pdserve.bench.report.words import plain

__all__ = ["Axes", "Frame", "Sheet", "bars", "png", "styled", "svg", "ticks"]

WIDE, NARROW = 1120.0, 368.0
"""Widths of the two drawings of every figure; the page shows the one that suits the window."""
SIZE = 12.0
"""Of all words, pixels."""

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib; the page puts its own in
    "font.size": SIZE,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label is a label, whatever dollars are in it
    "axes.linewidth": 1.0,
    "hatch.linewidth": 1.2,
    "path.simplify": False,
}


@contextmanager
def styled(salt: str = "pdserve") -> Iterator[None]:
    """Everything that draws or saves runs inside; nobody else's settings of matplotlib play a part."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": salt})
        yield


@dataclass(frozen=True, slots=True)
class Frame:
    """What a figure is drawn into."""

    width: float = WIDE
    title: str = ""
    """Stands above; empty in the page, which has its own heading."""
    finding: tuple[str, ...] = ()
    """Stands below the title, each on a line of its own."""


class Sheet:
    """One figure; y runs down from below the title, as on a page."""

    def __init__(self, frame: Frame, height: float) -> None:
        lines = [line for said in frame.finding for line in textwrap.wrap(said, int(frame.width / 7.2))]
        self.width, self.height = frame.width, height
        self._edge = 20.0 if frame.title else 0.0
        self._head = 62.0 + 18 * len(lines) if frame.title else 0.0
        self._whole = (self.width + 2 * self._edge, self.height + self._head)
        self.figure = Figure(figsize=(self._whole[0] / 72, self._whole[1] / 72), dpi=72)
        if frame.title:
            self.words(0, 28 - self._head, frame.title, bold=True, size=16)
            for row, line in enumerate(lines):
                self.words(0, 54 + 18 * row - self._head, line, colour=palette.MUTED)

    @property
    def narrow(self) -> bool:
        """Whether it is drawn for a small screen."""
        return self.width < WIDE

    def panel(
        self, left: float, top: float, width: float, height: float, *, grid: Literal["x", "y", "both"], steps: int = 5
    ) -> Axes:
        """A plot's frame: no box, a thin grid, a rule at the bottom where bars or lines stand on it; its y axis has at
        most `steps` steps."""
        box = (self._across(left), self._up(top + height), width / self._whole[0], height / self._whole[1])
        axes = self.figure.add_axes(box)
        axes.set_facecolor("none")
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(side == "bottom" and grid != "x")
        axes.spines["bottom"].set_color(palette.RULE)
        axes.grid(True, axis=grid, color=palette.GRID, linewidth=1)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=palette.MUTED, labelsize=SIZE - 1, pad=5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        axes.yaxis.set_major_locator(MaxNLocator(steps, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(5 if width < 500 else 10, steps=[1, 2, 5, 10]))
        return axes

    def words(
        self,
        x: float,
        y: float,
        said: str,
        *,
        colour: str = palette.INK,
        align: Literal["left", "center", "right"] = "left",
        bold: bool = False,
        size: float = SIZE,
    ) -> None:
        """Text whose middle line is at y."""
        self.figure.text(
            self._across(x), self._up(y), said, color=colour, ha=align, va="center", fontsize=size,
            fontweight="bold" if bold else "normal",
        )  # fmt: skip

    def mark(self, x: float, y: float, place: int) -> None:
        """A configuration's marker."""
        dot = Line2D(
            [self._across(x)], [self._up(y)], marker=palette.entry_marker(place), markersize=7, linestyle="none",
            color=palette.entry_colour(place), markeredgecolor=palette.SURFACE, markeredgewidth=1,
        )  # fmt: skip
        self.figure.add_artist(dot)

    def stroke(self, points: Sequence[tuple[float, float]], colour: str = palette.RULE) -> None:
        """A thin line through points."""
        xs = [self._across(x) for x, _ in points]
        ys = [self._up(y) for _, y in points]
        self.figure.add_artist(Line2D(xs, ys, color=colour, linewidth=1))

    def block(
        self, x: float, y: float, width: float, height: float, colour: str, hatch: str = "", edge: str = palette.SURFACE
    ) -> None:
        """A filled box, its upper left corner at (x, y)."""
        corner = (self._across(x), self._up(y + height))
        box = Rectangle(corner, width / self._whole[0], height / self._whole[1], transform=self.figure.transFigure)
        box.set(facecolor=colour, edgecolor=edge, linewidth=0.8, hatch=hatch or None)
        self.figure.add_artist(box)

    def place_of(self, axes: Axes, x: float, y: float) -> tuple[float, float]:
        """Where a point of a panel is on the sheet."""
        across, up = axes.transData.transform((x, y))
        return float(across) - self._edge, self.height - float(up)

    def _across(self, x: float) -> float:
        return (x + self._edge) / self._whole[0]

    def _up(self, y: float) -> float:
        return 1 - (y + self._head) / self._whole[1]


def bars(axes: Axes, xs: Sequence[float], tops: Sequence[float], width: float, colour: str, hatch: str = "") -> None:
    """Upright bars as one path: a hundred of them cost no more than one in the page."""
    if not xs:
        return
    half = width / 2
    shape = [(-half, 0.0), (-half, 1.0), (half, 1.0), (half, 0.0), (-half, 0.0)]
    corners = [(x + dx, top * up) for x, top in zip(xs, tops, strict=True) for dx, up in shape]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(xs)
    path = Path(numpy.array(corners), codes)
    edge = palette.SURFACE if hatch else colour
    axes.add_patch(PathPatch(path, facecolor=colour, edgecolor=edge, linewidth=0, hatch=hatch or None))
    if hatch:
        # The outline keeps a hatched bar as tall and as wide as a plain one to the eye.
        axes.add_patch(PathPatch(path, facecolor="none", edgecolor=colour, linewidth=1))


def ticks(axes: Axes, axis: Literal["x", "y"], places: Sequence[float], labels: Sequence[str]) -> None:
    """Ticks at these places and nowhere else."""
    which = axes.xaxis if axis == "x" else axes.yaxis
    which.set_major_locator(FixedLocator(list(places)))
    which.set_minor_locator(NullLocator())
    which.set_major_formatter(FuncFormatter(lambda _, index: labels[index] if 0 <= index < len(labels) else ""))


def svg(sheet: Sheet, name: str, alt: str) -> str:
    """The figure as an <svg> element for the page: its colours are CSS variables, its text is text, and its ids begin
    with `name`, so that many fit into one page. Nothing in it points outside."""
    out = io.StringIO()
    with styled(name):
        sheet.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :].strip()
    drawn = re.sub(r"\s*<metadata>.*?</metadata>", "", drawn, count=1, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.DOTALL)  # matplotlib repeats every text in one
    head, body = drawn.split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)
    if box is None:
        raise RuntimeError("matplotlib's SVG has no viewBox")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r'\b(d|points)="([^"]+)"', _rounded, body)
    body = re.sub(r'style="([^"]*)"', _themed_style, body)
    body = re.sub(r' fill="(#[0-9a-f]{6})"', lambda found: f' style="fill: {_themed(found[1])}"', body)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{_attribute(alt)}">{body}'


def png(sheet: Sheet, path: FilePath) -> None:
    """The figure as a picture of twice its size in pixels, light."""
    with styled():
        sheet.figure.savefig(path, format="png", dpi=144, facecolor=palette.SURFACE, metadata={"Software": None})


def _rounded(found: re.Match[str]) -> str:
    shorter = re.sub(r"(\.\d\d)\d+", r"\1", found[2])
    return f'{found[1]}="{" ".join(shorter.split())}"'


def _themed_style(found: re.Match[str]) -> str:
    style = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \1var(--font)", found[1])
    return f'style="{re.sub(r"#[0-9a-f]{6}", lambda colour: _themed(colour[0]), style)}"'


def _themed(colour: str) -> str:
    themed = palette.THEMED.get(colour)
    return f"var(--{themed[0]})" if themed else colour


def _attribute(said: str) -> str:
    for character, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        said = said.replace(character, entity)
    return said
