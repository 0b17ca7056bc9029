"""The plan's page in a real browser. Nothing is fake: it is a plan of simulated runs."""

from pathlib import Path

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import page as plan_page
from pdserve.planner.planning.candidates import Budget
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile_file import load
from tests.page.browser import Page

EVERY = "[...document.body.querySelectorAll('*')]"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four engines: seven ways, one with a name that is hard to break beside it."""
    workload = Workload(Span(2000, 2000), Span(200, 200), rate=4.0)
    question = Question(load("mi300x"), workload, Slo(ttft=1.0, itl=0.05))
    plan = decide(question, Budget(engines=4), Settings(requests=60, cost_per_engine_hour=2.0))
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    plan_page.write(plan, path)
    return path


@pytest.mark.parametrize("width", [320, 400, 700, 1280])
async def test_the_plan_fits_its_window(page: Page, report: Path, width: int) -> None:
    """Nothing runs past the window's edge, no cell is cut off, and the picture is drawn for the width; the table stands
    there once, and in words nowhere."""
    await page.size(width)
    await page.goto(report.as_uri())
    await page.until("document.readyState === 'complete' && document.querySelector('img').complete")
    assert await page.run("document.documentElement.scrollWidth") <= width
    assert await page.run(f"Math.max(...{EVERY}.map((e) => e.getBoundingClientRect().right))") <= width
    # Beside what only a screen reader is told, the head of the columns on a phone.
    told = "e.clientWidth <= 1 || (innerWidth <= 1152 && e.closest('thead'))"
    assert await page.run(f"{EVERY}.filter((e) => e.scrollWidth > e.clientWidth + 1 && !({told})).length") == 0
    assert await page.run("document.querySelectorAll('table').length") == 1
    text = await page.text("body")
    assert "-----" not in text
    drawn = await page.run("document.querySelector('img').naturalWidth")
    assert (drawn < 600) is (width <= 640)
