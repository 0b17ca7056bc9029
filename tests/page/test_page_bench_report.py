"""The bench's report in a real browser. Fake: the results are made up by a seeded model."""

from pathlib import Path

import pytest

from pdserve.bench.report import write_html
from pdserve.bench.report.chapter import Chapter
from pdserve.bench.report.picture import Table
from tests.page.browser import Page
from tests.unit.bench.bench_report_examples import COLOCATED, READ, WRITE, example, partial


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn once: three configurations, one with a label that is hard to break, one partial; a chapter with a wide
    table."""
    results = [
        example(
            COLOCATED, (2.0, 8.0), requests=20, tokens=6, label="a label that has no place to break " * 3 + "x" * 90
        ),
        example(READ, (2.0, 8.0), requests=20, tokens=6),
        partial(example(WRITE, (2.0, 8.0), requests=20, tokens=6, failing=0.2)),
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    wide = Table(
        ("ratio", *(f"attainment at {rate}/s" for rate in range(6))), (("WRITE / (b)", *["2.52 (1.83 to 3.74)"] * 6),)
    )
    write_html(results, path, chapters=[Chapter("All against each other", ("Words.",), (("Ratios", wide, ("why",)),))])
    return path


@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, False)])
async def test_the_report_fits_its_window(page: Page, report: Path, width: int, dark: bool) -> None:
    """Nothing runs past the window's edge, the drawing that suits it is shown, and the browser has no complaint: its
    policy, which forbids everything from outside, was never touched."""
    await page.size(width, dark=dark)
    await page.goto(report.as_uri())
    await page.until("document.readyState === 'complete' && document.querySelector('h1')")
    await page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert await page.run("document.documentElement.scrollWidth") <= width
    shown = await page.run(
        "[...document.querySelectorAll('svg')].filter((svg) => svg.getBoundingClientRect().width > 0)"
        ".map((svg) => svg.getBoundingClientRect().width)"
    )
    assert len(shown) == await page.run("document.querySelectorAll('figure').length")
    assert max(shown) <= width
    # Words in the figures are drawn about as large as they were meant: not scaled away.
    view = await page.run(
        "[...document.querySelectorAll('.narrow svg, .wide svg')].map((s) => s.viewBox.baseVal.width)"
    )
    assert min(shown) >= (0.9 * min(view) if width < 800 else 0.9 * max(view))
