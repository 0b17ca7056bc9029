"""The report of a bench: one self-contained HTML page, or its figures as PNG files, of any number of results.

`entries` and `comparison` say what is compared, `figures_*` draw on the surface of `figures`, `contents` puts them in
order, `page` renders. The base that others are compared with is the first of the results. What draws is imported
when something is drawn: who only wants the words or the ratios does not wait for matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.results import Results
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.report.chapter import Chapter

__all__ = ["write_html", "write_pngs"]


def write_html(
    results: Sequence[Results],
    path: Path,
    *,
    rate: float | None = None,
    letters: Sequence[str] = (),
    chapters: "Sequence[Chapter]" = (),
) -> None:
    """Writes the page; it needs nothing beside it, neither a file nor a network.

    `rate` is where the configurations are compared, requests a second; without it, the highest load that most of them
    were measured at. `letters` are the configurations' names in the figures; without them A, B, and so on. `chapters`
    stand behind the result.

    Raises:
        ConfigError: there are no results, none has a run at `rate`, or the file cannot be written.
    """
    from pdserve.bench.report.contents import contents_of
    from pdserve.bench.report.page import render

    page = render(contents_of(results, rate, letters), chapters)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def write_pngs(results: Sequence[Results], folder: Path, *, rate: float | None = None) -> list[Path]:
    """Writes every figure into `folder`, which is made where it is missing; gives their paths in the page's order.

    Raises:
        ConfigError: as `write_html`.
    """
    from pdserve.bench.report import figures
    from pdserve.bench.report.contents import contents_of

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in contents_of(results, rate).pictures:
            path = folder / f"{picture.key}.png"
            with figures.styled():
                sheet = picture.draw(figures.Frame(title=picture.title, finding=picture.finding))
            figures.png(sheet, path)
            written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error}") from error
    return written
