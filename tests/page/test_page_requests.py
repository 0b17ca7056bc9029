"""The list of recent requests; what is fake: the API, whose answers are canned."""

import re
from typing import Any

import pytest
from aiohttp import web

from tests.page import samples
from tests.page.browser import Page
from tests.page.stub import Store

ROWS = "[...document.querySelectorAll('.rows .row')]"


async def opened(page: Page, url: str, rows: int) -> None:
    """The list with that many rows."""
    await page.goto(f"{url}/#/")
    await page.until(f"{ROWS}.length === {rows}")


async def cells(page: Page, row: int) -> Any:
    """Texts of one row by column."""
    return await page.run(
        f"Object.fromEntries([...{ROWS}[{row}].children].map((c) => [c.classList[0].slice(2), c.innerText.trim()]))"
    )


async def test_a_row_says_everything_in_numbers(page: Page, store: Store, url: str) -> None:
    """Time, mode, outcome, tokens, TTFT and the two waits of a hand-over are text, not only colour."""
    row = samples.request(3)
    store.requests = [row]
    await opened(page, url, 1)
    said = await cells(page, 0)
    assert said["who"] == row["request_id"]
    assert (said["mode"], said["what"], said["tok"]) == ("READ", "✓ finished", "2,048 → 128")
    assert (said["ttft"], said["ser"], said["rdma"]) == ("228.605", "13.418", "31.906")
    assert said["time"].endswith(".193")


async def test_bars_are_to_one_scale(page: Page, store: Store, url: str) -> None:
    """A request twice as slow has a bar twice as long, and each segment is as long as its part."""
    double = {name: 2 * seconds for name, seconds in samples.READ_PARTS.items()}
    store.requests = [samples.request(2, unattributed=0.0), samples.request(1, parts=double, unattributed=0.0)]
    await opened(page, url, 2)
    single, twice = await page.run(
        f"{ROWS}.map((row) => Object.fromEntries([...row.querySelectorAll('.seg')].map("
        "(s) => [s.dataset.part, s.getBoundingClientRect().width])))"
    )
    lane = await page.run("document.querySelector('.rows .stack').getBoundingClientRect().width")
    assert single["kv.wait"] == pytest.approx(lane * samples.READ_PARTS["kv.wait"] / 0.5, abs=0.6)
    assert sum(twice.values()) == pytest.approx(2 * sum(single.values()), abs=1)


async def test_one_straggler_does_not_flatten_the_others(page: Page, store: Store, url: str) -> None:
    """A request that took far longer than most is cut off visibly, and its number is whole."""
    slow = samples.READ_PARTS | {"kv.wait": 30.0}
    store.requests = [samples.request(20, parts=slow), *[samples.request(number) for number in range(19, -1, -1)]]
    await opened(page, url, 21)
    assert await page.run("document.querySelectorAll('.stack.cut').length") == 1
    assert (await cells(page, 0))["ttft"] == "30,196.699"
    assert await page.run(f"{ROWS}[5].querySelector(\"[data-part='prefill.forward']\").offsetWidth") > 10


async def test_a_failed_request_shows_its_reason(page: Page, store: Store, url: str) -> None:
    """Failed requests have no TTFT and say why; a cancelled one says so."""
    store.requests = [row for row in store.requests if row["outcome"] != "finished"]
    await opened(page, url, 3)
    said = {(await cells(page, row))["what"]: await cells(page, row) for row in range(3)}
    bar = said["✕ failed"]["bar"].split("\n")
    assert bar[0] == "✕"
    assert re.fullmatch(r"PEER_LOST in RDMA wait \(kv\.wait\) after \d+\.\d{3} ms", bar[1])
    assert (said["✕ failed"]["ser"], said["✕ failed"]["rdma"]) == ("–", "–"), "no parts of a TTFT"
    assert said["✕ failed"]["ttft"] == "–"
    assert said["⊘ cancelled"]["bar"] == "CANCELLED"


async def test_data_is_text_and_never_markup(page: Page, store: Store, url: str) -> None:
    """A request id, model, reason or mode that is markup is shown as it is, and nothing of it runs."""
    evil = "<img src=x onerror=\"document.title='owned'\">"
    fields = ("request_id", "model", "reason", "transport")
    row = samples.request(1, outcome="failed", **dict.fromkeys(fields, evil))
    row["parts"][evil] = 0.02
    store.requests, store.traces[row["trace_id"]] = [row], samples.trace(row)
    for span in store.traces[row["trace_id"]]["spans"]:
        span |= {"status_message": evil, "instance": evil, "attributes": {evil: evil}}
    await opened(page, url, 1)
    said = await cells(page, 0)
    assert (said["who"], said["bar"]) == (evil, evil)
    assert evil in str(await page.run("document.querySelector('.choices').textContent"))
    await page.click(".rows a")
    await page.until("document.querySelectorAll('.spans li').length > 5")
    for span in ("pdserve.request", "pdserve.attempt"):
        await page.click(f"[data-span='{span}']")
    assert evil in await page.text(".details")
    assert await page.text("h1") == evil
    assert await page.run("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in await page.run("document.title.replace(document.querySelector('h1').textContent, '')")


async def test_new_requests_come_without_moving_the_reader(page: Page, store: Store, url: str) -> None:
    """A refresh puts new rows on top; the focused row keeps its focus and its place on the screen."""
    await opened(page, url, 40)
    await page.run(f"{ROWS}[30].querySelector('a').focus()")
    place = "[document.activeElement.textContent, Math.round(document.activeElement.getBoundingClientRect().top)]"
    await page.run("window.scrollBy(0, 60)")
    before = await page.run(place)
    store.requests = [samples.request(100 + number) for number in range(5)][::-1] + store.requests
    await page.until(f"{ROWS}.length === 45")
    assert await page.run(place) == before
    assert (await cells(page, 0))["who"] == store.requests[0]["request_id"]


async def test_a_row_that_drops_out_hands_its_focus_on(page: Page, store: Store, url: str) -> None:
    """The focus stays in the list when the focused request is no longer in it."""
    await opened(page, url, 40)
    await page.run(f"{ROWS}[39].querySelector('a').focus()")
    store.requests = store.requests[:20]
    await page.until(f"{ROWS}.length === 20")
    assert await page.run("document.activeElement.textContent") == store.requests[19]["request_id"]


async def test_pause_stops_asking(page: Page, store: Store, url: str) -> None:
    """While paused nothing is asked for; resuming asks at once."""
    await opened(page, url, 40)
    await page.click(".pause")
    await page.until("document.querySelector('.pause').getAttribute('aria-pressed') === 'true'")
    with pytest.raises(TimeoutError):
        # One call may have been under way; a second one within two intervals would be polling.
        await store.calls(2, timeout=4.5)
    store.requests = store.requests[:3]
    await page.click(".pause")
    await page.until(f"{ROWS}.length === 3")


async def test_filters_go_to_the_api_and_into_the_address(page: Page, store: Store, url: str) -> None:
    """A filter narrows the list, survives a reload, and says how to undo it where nothing matches."""
    await opened(page, url, 40)
    await page.choose("Mode", "write")
    await page.choose("Outcome", "finished")
    wanted = sum(row["mode"] == "write" and row["outcome"] == "finished" for row in store.requests)
    await page.until(f"{ROWS}.length === {wanted}")
    assert store.asked[-1] == "/api/pdserve/requests?limit=51&mode=write&outcome=finished"
    await page.call("Page.reload")
    await page.until(f"{ROWS}.length === {wanted} && location.hash.includes('mode=write')")
    await page.choose("Outcome", "cancelled")
    await page.choose("Mode", "none")
    assert "No request matches" in await page.text(".empty")


async def test_the_list_works_by_keyboard(page: Page, store: Store, url: str) -> None:
    """The skip link is first; arrows move, Enter opens, Escape comes back to the same row."""
    await opened(page, url, 40)
    await page.key("Tab")
    assert await page.run("document.activeElement.className") == "skip"
    assert await page.run("document.activeElement.getBoundingClientRect().top") >= 0
    await page.key("Enter")
    assert await page.run("document.activeElement.id") == "main"
    for _ in range(5):  # three filters, pause, first row
        await page.key("Tab")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowDown"):
        await page.key(key)
    assert await page.run("document.activeElement.textContent") == store.requests[2]["request_id"]
    assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert (await page.text(".legend .k-decode dd")).endswith(" ms")
    await page.key("Enter")
    await page.until("document.querySelectorAll('.spans li').length > 5")
    assert await page.run("document.activeElement.tagName") == "H1"
    await page.key("Escape")
    await page.until(f"{ROWS}.length === 40")
    assert await page.run("document.activeElement.textContent") == store.requests[2]["request_id"]


async def test_an_empty_store_says_what_to_do(page: Page, store: Store, url: str) -> None:
    """Without requests the page has the command that makes one."""
    store.requests = []
    await page.goto(f"{url}/#/")
    assert 'pdserve generate "The capital of France is"' in await page.text(".empty pre")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (503, '{"errors": [{"code": 503, "msg": "the store is closing"}]}', "503 Service Unavailable: the store is"),
        (500, "Server got itself in trouble", "500 Internal Server Error: Server got itself"),
        (200, "<html>", "answered with something that is no JSON: <html>"),
        (200, '{"rows": []}', 'answered without "requests"'),
    ],
)
async def test_errors_are_shown_and_pass(page: Page, store: Store, url: str, status: int, body: str, said: str) -> None:
    """What the API answers instead of data is on the page, beside what was there, until it answers well again."""
    await opened(page, url, 40)
    store.failure = web.Response(status=status, text=body)
    shown = await page.until("document.querySelector('#problem').innerText")
    assert said in shown
    assert shown.startswith("/api/pdserve/requests?limit=51: ")
    assert await page.run(f"{ROWS}.length") == 40
    store.failure = None
    await page.until("document.querySelector('#problem').innerText === ''")
    page.complaints.clear()  # the browser logs a bad status itself
