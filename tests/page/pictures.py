"""Takes the pictures of the page that the documentation shows: `python -m tests.page.pictures [FOLDER]`."""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.page import samples
from tests.page.browser import started
from tests.page.conftest import tab
from tests.page.stub import Store, serving

DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
LOWEST = 480
REQUESTS = ("read", "write", "failed", "retried")
SHOWN = {f"traces-{name}.png" for name in ("requests", "compare", "time", *(f"request-{kind}" for kind in REQUESTS))}
READY = "document.querySelector('.rows .row, .spans li, .medians tbody tr, .chart polyline')"


def views(rows: list[samples.Json]) -> dict[str, str]:
    """Name of the picture and the view's address."""
    first = {mode: next(row for row in rows if row["mode"] == mode) for mode in ("read", "write")}
    retried = next(row for row in rows if row["fallbacks"])
    failed = next(row for row in rows if row["outcome"] == "failed")
    found = {"requests": "#/", "compare": "#/compare", "time": "#/time"}
    for name, row in (first | {"retried": retried, "failed": failed}).items():
        found[f"request-{name}"] = f"#/request/{row['trace_id']}"
    return found


async def take(sizes: dict[str, tuple[int, int, bool]]) -> dict[str, bytes]:
    """Every view in every size (width, largest height, dark): file names and PNGs, as high as the view is."""
    taken = {}
    rows = samples.many()
    cause = "PEER_LOST: the prefill engine has gone"
    traces = {row["trace_id"]: samples.trace(row, cause) for row in rows}
    store = Store(rows, traces)
    store.parts = {mode: samples.parts(mode) for mode in ("", "read", "write")}
    with tempfile.TemporaryDirectory() as profile, started(Path(profile)) as address:
        async with serving(store) as url, tab(address) as page:
            for size, (width, highest, dark) in sizes.items():
                for name, where in views(rows).items():
                    await page.size(width, LOWEST, dark=dark)
                    await page.goto("about:blank")
                    await page.goto(f"{url}/{where}")
                    await page.until(READY)
                    tall = await page.run("document.documentElement.scrollHeight")
                    await page.size(width, min(tall, highest), dark=dark)
                    taken[f"traces-{name}{size}.png"] = await page.picture()
            assert page.complaints == [], page.complaints
    return taken


def main() -> None:
    """The documentation's pictures; given a folder, every view at 1280 and 400 pixels and in the dark."""
    chosen = sys.argv[1:]
    every = {"-1280": (1280, 2400, False), "-400": (400, 2400, False), "-dark": (1280, 2400, True)}
    taken = asyncio.run(take(every if chosen else {"": (1280, 900, False)}))
    folder = Path(chosen[0]) if chosen else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in taken.items():
        if chosen or name in SHOWN:
            (folder / name).write_bytes(picture)


if __name__ == "__main__":
    main()
