"""How the page says that a request ended early, and how it is opened by an id; what is fake: the API."""

from typing import Any

import pytest

from tests.page import samples
from tests.page.browser import Page
from tests.page.stub import Store

Json = samples.Json
LATER = ["decode.queue", "decode.first_step"]


def ended(outcome: str, **changed: Any) -> tuple[Json, Json]:
    """A READ that ended in kv.wait or later: its row, and its trace."""
    parts = dict(list(samples.READ_PARTS.items())[:9])
    after = sum(parts.values())
    said: Json = {
        "outcome": outcome, "reason": {"failed": "PEER_LOST", "cancelled": "CANCELLED"}[outcome], "ttft": None,
        "output_tokens": 0, "parts": parts, "unattributed": 0.0, "e2e": after, "failed_after": after,
        "failed_in": "kv.wait", "failed_or_later": LATER,
    }  # fmt: skip
    row = samples.request(5, **(said | changed))
    trace = samples.trace(row)
    for span in trace["spans"]:
        if span["name"] in ("pdserve.attempt", "pdserve.kv.wait"):
            span["attributes"] |= {"pdserve.failed_in.or_later": row["failed_or_later"]}
        if span["name"] == "pdserve.request":
            span["attributes"] |= {"pdserve.failed_in.or_later": row["failed_or_later"]}
    return row, trace


async def opened(page: Page, store: Store, url: str, row: Json, trace: Json) -> None:
    """The view of this request."""
    store.requests, store.traces = [row], {row["trace_id"]: trace}
    await page.goto(f"{url}/#/request/{row['trace_id']}/{row['request_id']}")
    await page.until("document.querySelectorAll('.spans li').length > 3")


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
async def test_a_part_whose_end_nobody_saw_is_or_later(page: Page, store: Store, url: str, outcome: str) -> None:
    """In the list, above the parts, in their table and in the attempts: `or later`. A request that was cancelled says
    so, and neither a cross nor the colour of failures is anywhere."""
    row, trace = ended(outcome)
    store.requests = [row]
    await page.goto(f"{url}/#/")
    await page.until("document.querySelectorAll('.rows .row').length === 1")
    assert "in RDMA wait (kv.wait) or later after" in await page.text(".rows .row")
    await opened(page, store, url, row, trace)
    assert await page.text(".f-where b") == "RDMA wait (kv.wait) or later"
    assert ", ".join(LATER) in await page.text(".f-where small")
    how, mark = {"failed": ("failed", "✕"), "cancelled": ("was cancelled", "⊘")}[outcome]
    assert f"{mark} RDMA wait (kv.wait) or later, until it {how}" in await page.text(".parts tbody")
    assert "in RDMA wait (kv.wait) or later" in await page.text(".attempts li")
    label = await page.run("document.querySelector('.to-first .stack').getAttribute('aria-label')")
    assert label.endswith(f"where it {how}, or later")
    text = await page.text("main")
    red = await page.run(
        "(() => { const probe = document.createElement('i'); probe.style.color = 'var(--bad)';"
        " document.body.append(probe); const bad = getComputedStyle(probe).color; probe.remove();"
        " return [...document.querySelectorAll('main *')].filter((e) => e.childNodes.length && e.offsetParent &&"
        " getComputedStyle(e).color === bad).map((e) => e.innerText); })()"
    )
    if outcome == "failed":
        assert red
        assert "it failed here, or later: " in text
    else:
        assert red == []
        assert "cancelled here, or later: " in text
        assert "✕" not in text
        assert "failed" not in text
        assert await page.run("document.querySelectorAll('.broken').length") == 0


async def test_a_part_whose_end_was_seen_is_the_one(page: Page, store: Store, url: str) -> None:
    """Without the doubt there is no `or later`."""
    await opened(page, store, url, *ended("failed", failed_or_later=[]))
    assert await page.text(".f-where b") == "RDMA wait (kv.wait)"
    assert "or later" not in await page.text("main")


async def test_one_that_ended_in_the_stream_says_so(page: Page, store: Store, url: str) -> None:
    """It has its TTFT, and after how long it ended."""
    row = samples.request(5, outcome="failed", reason="ENGINE_DIED", e2e=0.609)
    await opened(page, store, url, row, samples.trace(row))
    assert "in decode.stream, after 609.000 ms" in await page.text(".facts")
    assert "TTFT" in await page.text(".parts thead")


async def test_the_list_of_later_parts_has_room_on_a_phone(page: Page, store: Store, url: str) -> None:
    """At 400 pixels it takes the whole width, and nothing scrolls sideways."""
    await page.size(400)
    await opened(page, store, url, *ended("failed"))
    widths = "['.f-where', '.figures'].map((of) => document.querySelector(of).getBoundingClientRect().width)"
    own, all_ = await page.run(widths)
    assert own == all_
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")


async def test_an_id_can_be_opened(page: Page, store: Store, url: str) -> None:
    """/ goes to the field, Enter opens what was typed, spaces around it or not; the view takes the focus. A request's
    address with its own id alone works, and has the trace's id for Jaeger."""
    row = store.requests[3]
    await page.goto(f"{url}/#/")
    await page.until("document.querySelectorAll('.rows .row').length === 40")
    await page.key("/")
    assert await page.run("document.activeElement.name") == "id"
    await page.run(f"document.activeElement.value = '  {row['request_id']} '")
    await page.key("Enter")
    await page.until("document.querySelectorAll('.spans li').length > 3")
    assert await page.text("h1") == row["request_id"]
    assert await page.run("location.hash") == f"#/request/{row['request_id']}"
    assert await page.run("document.activeElement.tagName") == "H1"
    assert row["trace_id"] in await page.text(".trace")
    assert await page.run("document.querySelector('.json').pathname") == f"/api/traces/{row['trace_id']}"
    await page.key("Escape")
    await page.until("document.querySelectorAll('.rows .row').length === 40")


async def test_what_is_not_there_is_not_offered(page: Page, store: Store, url: str) -> None:
    """Of an unknown id there is no JSON for Jaeger."""
    await page.goto(f"{url}/#/request/nothing")
    assert "No such trace" in await page.text(".empty h2")
    assert await page.run("document.querySelector('.json').offsetParent === null")
    page.complaints.clear()  # the browser logs the 404 itself


async def test_a_list_that_is_cut_says_so(page: Page, store: Store, url: str) -> None:
    """Fifty are shown; where there are more, that is said, and more can be had. Fifty that are all are no cut."""
    store.requests = [samples.request(number) for number in range(50, 0, -1)]
    await page.goto(f"{url}/#/")
    await page.until("document.querySelectorAll('.rows .row').length === 50")
    assert await page.run("document.querySelector('.more').hidden")
    store.requests = [samples.request(51), *store.requests]
    await page.until("!document.querySelector('.more').hidden")
    assert await page.text(".more") == "These are the newest 50; there are more. Show 200"
    assert await page.run("document.querySelectorAll('.rows .row').length") == 50
    await page.click(".more button")
    await page.until("document.querySelectorAll('.rows .row').length === 51")
    assert await page.run("document.querySelector('.more').hidden")
