"""READ beside WRITE, and a part over time; what is fake: the API, whose answers are canned."""

import pytest

from tests.page import samples
from tests.page.browser import Page
from tests.page.stub import Store

MEDIANS = "[...document.querySelectorAll('.medians tbody tr')]"


async def test_medians_stand_side_by_side(page: Page, store: Store, url: str) -> None:
    """Each part has READ's and WRITE's P50 with bars to one scale, and the difference."""
    await page.goto(f"{url}/#/compare")
    await page.until(f"{MEDIANS}.length > 10")
    rows = await page.run(
        f"Object.fromEntries({MEDIANS}.map((row) => [row.children[0].innerText.trim(), [...row.children].slice(1)"
        ".map((cell) => [cell.innerText.trim(), cell.querySelector('.seg')?.getBoundingClientRect().width ?? 0])]))"
    )
    read, write = store.parts["read"]["total"]["p50"], store.parts["write"]["total"]["p50"]
    waits = rows["RDMA wait (kv.wait)"]
    assert [text for text, _ in waits[:2]] == [f"{read['kv.wait'] * 1e3:.2f}", f"{write['kv.wait'] * 1e3:.2f}"]
    assert waits[2][0] == f"−{(read['kv.wait'] - write['kv.wait']) * 1e3:.2f}"
    forward = rows["prefill.forward"][0][1]
    assert waits[0][1] == pytest.approx(forward * read["kv.wait"] / read["prefill.forward"], abs=1)


async def test_ttft_has_three_quantiles_for_each_mode(page: Page, store: Store, url: str) -> None:
    """P50, P90 and P99 of TTFT, with the number of requests behind them."""
    await page.goto(f"{url}/#/compare")
    await page.until(f"{MEDIANS}.length > 10")
    for row, mode in enumerate(("read", "write"), 1):
        said = await page.run(
            f"[...document.querySelector('.spread tbody tr:nth-child({row})').children].map((c) => c.innerText)"
        )
        total = store.parts[mode]["total"]
        assert said[1:4] == [f"{total[each]['ttft'] * 1e3:.2f}" for each in ("p50", "p90", "p99")]
        assert said[4] == str(total["count"])


async def test_a_mode_without_requests_says_how_to_get_one(page: Page, store: Store, url: str) -> None:
    """Where only READ was used, its numbers are there, and the command for WRITE."""
    del store.parts["write"]
    await page.goto(f"{url}/#/compare")
    assert "--mode write" in await page.text(".empty pre")
    assert await page.run(f"{MEDIANS}.length") > 10


async def test_nothing_in_the_window_says_what_to_do(page: Page, store: Store, url: str) -> None:
    """Both views over an empty window show a command instead of an empty picture."""
    store.parts = {}
    for view in ("compare", "time"):
        await page.goto(f"{url}/#/{view}")
        assert "pdserve generate" in await page.text(".empty pre")


async def test_the_chart_breaks_where_nothing_came(page: Page, store: Store, url: str) -> None:
    """Buckets without requests are a gap: no line is drawn across them."""
    await page.goto(f"{url}/#/time")
    await page.until("document.querySelectorAll('.chart polyline').length === 6")
    heights = await page.run(
        "[...document.querySelectorAll('.chart polyline.q0')].map((l) => l.getAttribute('points').split(' ').length)"
    )
    assert heights == [20, 36]


async def test_the_cursor_reads_the_chart_by_keyboard_and_pointer(page: Page, store: Store, url: str) -> None:
    """Home, End and arrows move over the buckets; what is under the cursor is text, for screen readers too."""
    await page.goto(f"{url}/#/time?series=kv.wait")
    await page.until("document.querySelector('.chart polyline')")
    buckets = store.parts[""]["buckets"]
    await page.run("document.querySelector('.chart').focus()")
    for key, bucket in (("Home", buckets[0]), ("ArrowRight", buckets[1]), ("End", buckets[-1])):
        await page.key(key)
        heard = await page.run("document.querySelector('.chart').getAttribute('aria-valuetext')")
        for quantile in ("p50", "p90", "p99"):
            assert f"{quantile.upper()} {bucket[quantile]['kv.wait'] * 1e3:.2f} ms" in heard
        assert f"{bucket['p50']['kv.wait'] * 1e3:.2f}" in await page.text(".said")
    box = await page.run("(({left, top}) => [left, top])(document.querySelector('.chart').getBoundingClientRect())")
    await page.move(box[0] + 84, box[1] + 100)
    assert f"{buckets[0]['p50']['kv.wait'] * 1e3:.2f}" in await page.text(".said")


async def test_another_part_and_another_window_can_be_chosen(page: Page, store: Store, url: str) -> None:
    """The part is drawn from what is there, the window is asked for, and both are in the address."""
    await page.goto(f"{url}/#/time")
    await page.until("document.querySelector('.chart polyline')")
    await page.choose("Show", "proxy.serialization")
    assert "proxy serialization" in await page.text(".figures")
    calls = len(store.asked)
    await page.choose("Window", "21600")
    await page.until("location.hash.includes('window=21600') && location.hash.includes('series=proxy.serialization')")
    if len(store.asked) == calls:
        await store.calls(1)
    assert store.asked[-1] == "/api/pdserve/parts?window=21600&bucket=360"


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("view", ["", "compare", "time", "request"])
async def test_nothing_is_wider_than_the_window(page: Page, store: Store, url: str, view: str, width: int) -> None:
    """No view scrolls sideways, on a phone or on a desk, also with a request id of 200 characters."""
    row = samples.request(500, request_id="x" * 200)
    store.requests = [row, *store.requests]
    store.traces[row["trace_id"]] = samples.trace(row)
    await page.size(width)
    await page.goto(f"{url}/#/{view}" + (f"/{row['trace_id']}" if view == "request" else ""))
    await page.until("document.querySelector('.rows .row, .spans li, .medians tbody tr, .chart polyline') !== null")
    assert await page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("view", ["", "compare", "time", "request"])
async def test_nothing_jumps(page: Page, store: Store, url: str, view: str, width: int) -> None:
    """While a view fills and refreshes, what is already on the screen stays where it is."""
    row = store.requests[0]
    await page.size(width)
    await page.goto(f"{url}/#/{view}" + (f"/{row['trace_id']}" if view == "request" else ""))
    await page.until("document.querySelector('.rows .row, .spans li, .medians tbody tr, .chart polyline')")
    if view == "":
        await store.calls(1)
    # The browser's own measure: the moved share of the window times how far it moved.
    moved = await page.run(
        "new Promise((done) => { const all = []; new PerformanceObserver((list) => all.push(...list.getEntries()))"
        ".observe({ type: 'layout-shift', buffered: true }); setTimeout(() =>"
        " done(all.map((e) => [e.value, ...e.sources.map((s) => s.node?.className ?? '')])), 200); })"
    )
    assert sum(value for value, *_ in moved) < 0.01, moved


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("view", ["", "compare", "time", "request"])
async def test_text_can_be_read(page: Page, store: Store, url: str, view: str, dark: bool) -> None:
    """Every text has a contrast of 4.5 to its ground, light and dark."""
    row = next(row for row in store.requests if row["fallbacks"])
    await page.size(1280, dark=dark)
    await page.goto(f"{url}/#/{view}" + (f"/{row['trace_id']}" if view == "request" else ""))
    await page.until("document.querySelector('.rows .row, .spans li, .medians tbody tr, .chart polyline') !== null")
    poor = await page.run(CONTRAST)
    assert poor == []


CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] === 255) return c; } return [255, 255, 255]; };
  const poor = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, style = getComputedStyle(e);
    if (!texts.currentNode.data.trim() || !e.checkVisibility() || e.closest('.unseen, noscript, option')) continue;
    const [a, b] = [light(rgba(e instanceof SVGElement ? style.fill : style.color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([texts.currentNode.data, ratio.toFixed(2)]);
  }
  return poor;
})()
"""
