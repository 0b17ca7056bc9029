"""A plan as a file: one HTML page that needs nothing else, on a desk or on a phone, or its picture."""

import base64
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from pdserve.planner.planning import figure, verdict, words
from pdserve.planner.planning.plan import Plan
from pdserve.rpc.errors import ConfigError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1b1e23;
  background: #fff; overflow-wrap: break-word }
h1 { font-size: 1.4rem; line-height: 1.3 }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .5rem; text-align: right; white-space: nowrap } thead th { border-bottom: 1px solid #b9bab4 }
th:first-child { text-align: left } tbody th { font-weight: 400; white-space: normal }
.chosen :is(th, td) { font-weight: 600 }
pre { white-space: pre-wrap; background: #f4f4f1; padding: .8rem } pre span { display: inline-block; max-width: 100% }
@media (max-width: 72rem) {
  thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden }
  table, tbody, tr, th, td { display: block } tr { border-top: 1px solid #b9bab4; padding: .4rem 0 }
  td { display: flex; justify-content: space-between; padding: 0 } tbody th { padding: 0; text-align: left }
  td::before { content: attr(data-name); color: #5c6068; font-weight: 400 } td:empty { display: none }
}
"""
_PHONE = "(max-width: 40rem)"


def write(plan: Plan, path: Path) -> None:
    """`.png`: the picture; `.html`: the page with it, the words and the table.

    Raises:
        ConfigError: another ending, or the file cannot be written.
    """
    check(path)
    try:
        path.write_bytes(figure.png(plan) if path.suffix == ".png" else page(plan).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def check(path: Path) -> None:
    """Raises ConfigError for another ending, or a folder that is not there."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"{path}: a report is a .html or a .png file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")


def page(plan: Plan) -> str:
    """The page: the answer, why, the picture, the table, and all else in words."""
    title = escape(verdict.answer(plan).removeprefix("-> "))
    said = [one for one in words.before(plan) if one != verdict.answer(plan)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan: {title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1>{_joined(f'<p>{escape(one.strip())}</p>' for one in said)}"
        f'<picture><source media="{_PHONE}" srcset="{_picture(plan, narrow=True)}">'
        f'<img src="{_picture(plan, narrow=False)}" alt="{title}"></picture>'
        f"{_table(plan)}{_joined(map(_paragraph, words.after(plan)))}</body></html>\n"
    )


def _picture(plan: Plan, *, narrow: bool) -> str:
    drawn = figure.png(plan, titled=False, narrow=narrow)
    return f"data:image/png;base64,{base64.b64encode(drawn).decode()}"


def _table(plan: Plan) -> str:
    names, *ways = words.table(plan)
    head = _joined(f"<th scope=col>{escape(name)}</th>" for name in names)
    best = plan.best.candidate.label
    rows = []
    for way, *cells in ways:
        pairs = zip(names[1:], cells, strict=True)
        row = _joined(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in pairs)
        chosen = ' class="chosen"' if way == best else ""
        rows.append(f"<tr{chosen}><th scope=row>{escape(way)}</th>{row}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{_joined(rows)}</tbody></table>"


def _paragraph(of: words.Paragraph) -> str:
    items = _joined(f"<li>{escape(item)}</li>" for item in of.items)
    shown = f"<ul>{items}</ul>" if items else ""
    # A line of the command ends before a flag, and not at the dashes of one.
    flags = " ".join(f"<span>{escape(part)}</span>" for part in re.split(" (?=--)", of.code))
    code = f"<pre>{flags}</pre>" if of.code else ""
    return f"<p>{escape(of.text)}</p>{shown}{code}"


def _joined(parts: Iterable[str]) -> str:
    return "".join(parts)
