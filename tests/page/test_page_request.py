"""The view of one request; what is fake: the API, whose answers are canned."""

from typing import Any

import pytest

from tests.page import samples
from tests.page.browser import Page
from tests.page.stub import Store

Json = samples.Json
CAUSE = "PEER_LOST: the prefill engine has gone"


async def opened(page: Page, store: Store, url: str, row: Json, cause: str = "") -> None:
    """The view of this request."""
    store.traces[row["trace_id"]] = samples.trace(row, cause)
    await page.goto(f"{url}/#/request/{row['trace_id']}/{row['request_id']}")
    await page.until("document.querySelectorAll('.spans li').length > 3")


async def table(page: Page, section: str) -> dict[str, float]:
    """First two columns of a table of numbers."""
    rows: list[list[str]] = await page.run(
        f"[...document.querySelectorAll('.{section} :is(tbody, tfoot) tr')].map("
        "(row) => [...row.children].slice(0, 2).map((cell) => cell.innerText.trim()))"
    )
    return {name.lstrip("+=PD\n\t "): _number(value) for name, value in rows}


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-").replace("±", ""))


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_parts_add_up_to_the_microsecond(page: Page, store: Store, url: str, mode: str) -> None:
    """The parts as they are written, rounded, and what is unattributed sum to the TTFT as it is written."""
    row = next(row for row in store.requests if row["mode"] == mode and not row["fallbacks"])
    await opened(page, store, url, row)
    said = await table(page, "parts")
    ttft, total, rest = said.pop("TTFT"), said.pop("sum of parts"), said.pop("unattributed")
    assert len(said) == len(row["parts"])
    assert sum(said.values()) == pytest.approx(total, abs=1e-9)
    assert total + rest == pytest.approx(ttft, abs=1e-9)
    assert ttft == round(row["ttft"] * 1000, 3)
    assert said["proxy serialization"] == pytest.approx(row["parts"]["proxy.serialization"] * 1000, abs=0.001)
    assert said["RDMA wait (kv.wait)"] == pytest.approx(row["parts"]["kv.wait"] * 1000, abs=0.001)


async def test_parts_that_do_not_add_up_are_told(page: Page, store: Store, url: str) -> None:
    """A record whose parts miss the TTFT is not rounded into shape."""
    row = samples.request(1)
    row["ttft"] += 0.005
    await opened(page, store, url, row)
    assert "differ from TTFT by -5.000 ms" in await page.text(".parts .bad")


async def test_reads_formula_is_a_plain_sum(page: Page, store: Store, url: str) -> None:
    """READ: queue(P) + forward(P) + serialization + wait + queue(D) + tail; the terms add up to the formula."""
    row = samples.request(1, "read")
    await opened(page, store, url, row)
    said = await table(page, "formula")
    formula, beyond = said.pop("formula"), said.pop("TTFT beyond it")
    assert list(said)[:4] == ["queue(P)", "forward(P)", "proxy serialization", "RDMA wait"]
    assert sum(said.values()) == pytest.approx(formula, abs=0.01)
    assert formula + beyond == pytest.approx(row["ttft"] * 1000, abs=0.002)


async def test_writes_formula_takes_the_larger_side(page: Page, store: Store, url: str) -> None:
    """WRITE: max(queue(P) + forward(P) + write, queue(D)) + tail."""
    await opened(page, store, url, samples.request(1, "write"))
    said = await table(page, "formula")
    pushed = said["queue(P)"] + said["forward(P)"] + said["write"]
    assert said["the larger of P and D"] == pytest.approx(max(pushed, said["queue(D)"]), abs=0.01)
    tail = sum(said[name] for name in ("first token", "detokenize", "encode", "network"))
    assert said["formula"] == pytest.approx(said["the larger of P and D"] + tail, abs=0.01)
    assert await page.text(".formula h2") == "WRITE's formula"


async def test_a_request_served_alone_has_no_formula(page: Page, store: Store, url: str) -> None:
    """Without a hand-over there is neither formula to show."""
    await opened(page, store, url, samples.request(1, "none"))
    assert await page.run("document.querySelector('.formula')") is None


async def test_the_waterfall_is_to_scale(page: Page, store: Store, url: str) -> None:
    """Each bar begins and ends where its span does; depth follows parents; durations have three decimals."""
    row = samples.request(1, "read")
    await opened(page, store, url, row)
    full = row["ttft"] * 1.04
    spans = {span["name"]: span for span in store.traces[row["trace_id"]]["spans"]}
    shown: list[Any] = await page.run(
        "[...document.querySelectorAll('button.span')].map((b) => { const l = b.querySelector('.lane')"
        ".getBoundingClientRect(), r = b.querySelector('.span-bar').getBoundingClientRect(); return [b.dataset.span,"
        " (r.left - l.left) / l.width, r.width / l.width, b.style.getPropertyValue('--depth'),"
        " b.querySelector('.num').firstChild.textContent]; })"
    )
    assert len(shown) == len(spans)
    for name, left, width, _, duration in shown:
        span = spans[name]
        begin = (span["start_us"] - row["start_us"]) / 1e6 / full
        if begin < 0.99:
            assert left == pytest.approx(begin, abs=0.004), name
            assert width == pytest.approx(min(span["duration_us"] / 1e6 / full, 1 - begin), abs=0.012), name
        assert _number(duration) == pytest.approx(span["duration_us"] / 1000, abs=0.00051)
    depths = {name: int(depth) for name, _, _, depth, _ in shown}
    assert depths["pdserve.request"] == 0
    assert depths["pdserve.attempt"] == depths["pdserve.tokenize"] == 1
    assert depths["pdserve.kv.wait"] == 2
    assert depths["pdserve.kvd.copy"] == 3


async def test_the_whole_request_can_be_seen(page: Page, store: Store, url: str) -> None:
    """The scale changes from the first token to the whole request."""
    await opened(page, store, url, samples.request(1))
    width = "document.querySelector(\"[data-span='pdserve.attempt'] .span-bar\").getBoundingClientRect().width"
    before = await page.run(width)
    await page.click(".zoom label:last-child")
    await page.until(f"{width} < {before / 3}")


async def test_a_spans_attributes_open_and_close(page: Page, store: Store, url: str) -> None:
    """Enter opens what is known of a span, Escape closes it, and a second Escape leaves the request."""
    await page.goto(f"{url}/#/")
    await page.until("document.querySelectorAll('.rows .row').length === 40")
    await opened(page, store, url, samples.request(1, "write"))
    await page.run("document.querySelector(\"[data-span='pdserve.kvd.copy']\").focus()")
    await page.key("Enter")
    said = await page.text(".details")
    assert "pdserve.kv.bytes" in said
    assert "47,185,920" in said
    await page.key("ArrowDown")
    assert await page.run("document.activeElement.dataset.span") == "pdserve.kvd.notify"
    await page.key("Enter")
    await page.click("[id$='a8'] .plain, .details .plain")  # its link leads to the push that went before
    assert await page.run("document.activeElement.dataset.span") == "pdserve.kvd.push"
    assert await page.run("document.querySelectorAll('.inside:not([hidden])').length") == 3
    await page.key("Escape")
    assert await page.run("document.activeElement.dataset.span") == "pdserve.kvd.push"
    assert await page.run("document.querySelectorAll('.inside:not([hidden])').length") == 2
    await page.key("Escape")
    await page.until("document.querySelectorAll('.rows .row').length === 40")


async def test_retried_attempts_are_siblings_with_their_cause(page: Page, store: Store, url: str) -> None:
    """Both attempts are at one level; the failed one says why, in the waterfall and in the list of attempts."""
    row = next(row for row in store.requests if row["fallbacks"])
    await opened(page, store, url, row, CAUSE)
    shown = await page.run(
        "[...document.querySelectorAll(\"[data-span='pdserve.attempt']\")].map((b) =>"
        " [b.style.getPropertyValue('--depth'), b.querySelector('.cause')?.innerText ?? ''])"
    )
    assert shown == [["1", CAUSE], ["1", ""]]
    tried = await page.run("[...document.querySelectorAll('.attempts li')].map((li) => li.innerText)")
    assert "✕ failed" in tried[0]
    assert CAUSE in tried[0]
    assert "✓ answered" in tried[1]


async def test_the_critical_path_is_marked_in_words_too(page: Page, store: Store, url: str) -> None:
    """Spans on the critical path are underlined, and a screen reader hears it."""
    row = next(row for row in store.requests if row["fallbacks"])
    await opened(page, store, url, row, CAUSE)
    marked = await page.run("document.querySelectorAll('.span-bar.critical').length")
    heard = "[...document.querySelectorAll('button.span')].filter((b) => b.textContent.includes('critical path'))"
    assert marked == sum(span["critical"] for span in store.traces[row["trace_id"]]["spans"]) > 0
    assert await page.run(f"{heard}.length") == marked


async def test_a_failed_request_explains_itself(page: Page, store: Store, url: str) -> None:
    """No TTFT is made up; reason and message are there. In place of the figures of a TTFT it says when it failed and in
    which part; the parts until then sum to that, to the microsecond, and the last is marked in more than colour."""
    row = next(row for row in store.requests if row["outcome"] == "failed")
    await opened(page, store, url, row)
    assert "PEER_LOST: the prefill engine has gone" in await page.text(".facts")
    assert "ended before its first token" in await page.text(".parts .note")
    assert await page.text(".f-all b") == "–"
    figures = await page.run("[...document.querySelectorAll('.f-failed b')].map((b) => b.innerText)")
    assert figures == [f"{row['failed_after'] * 1000:.3f}", "RDMA wait (kv.wait)"]
    said = await table(page, "parts")
    after, total, rest = said.pop("failed after"), said.pop("sum of parts"), said.pop("unattributed")
    assert after == round(row["failed_after"] * 1000, 3)
    assert sum(said.values()) == pytest.approx(total, abs=1e-9)
    assert total + rest == pytest.approx(after, abs=1e-9)
    assert list(said)[-1] == "✕ RDMA wait (kv.wait), until it failed"
    assert "TTFT" not in await page.text(".parts thead")
    label = await page.run("document.querySelector('.to-first .stack').getAttribute('aria-label')")
    assert label.endswith(
        f"RDMA wait (kv.wait) {said['✕ RDMA wait (kv.wait), until it failed']:.3f} ms, where it failed"
    )
    broken = "getComputedStyle(document.querySelector('.to-first .seg.broken')).backgroundImage"
    assert (await page.run(broken)).count("repeating-linear-gradient") == 2
    assert await page.run("document.querySelector('.formula')") is None


async def test_where_it_failed_is_said_once(page: Page, store: Store, url: str) -> None:
    """The attempt has the cause; below it the part says that it was there, and what of that nobody has stamped."""
    row = next(row for row in store.requests if row["outcome"] == "failed")
    trace = samples.trace(row)
    part = next(span for span in trace["spans"] if span["name"] == "pdserve.kv.wait")
    part["attributes"] |= {
        "pdserve.failed_in.or_later": ["decode.queue", "decode.first_step"], "pdserve.unstamped": ["prefill.hop"],
    }  # fmt: skip
    store.traces[row["trace_id"]] = trace
    await page.goto(f"{url}/#/request/{row['trace_id']}/{row['request_id']}")
    await page.until("document.querySelectorAll('.spans li').length > 3")
    cause = "document.querySelector(\"[data-span='pdserve.%s'] .cause\").innerText"
    assert await page.run(cause % "attempt") == "PEER_LOST: the prefill engine has gone"
    assert await page.run(cause % "kv.wait") == (
        "it failed here, or later: decode.queue, decode.first_step (nobody has stamped that); "
        "not stamped before: prefill.hop"
    )
    assert await page.run("document.querySelectorAll('.span-bar.broken').length") == 1
    assert "in RDMA wait (kv.wait)" in await page.text(".attempts li")


async def test_a_failed_attempt_shows_its_parts(page: Page, store: Store, url: str) -> None:
    """A retried request: the attempt that failed has a bar of its parts, which ends in the one that it failed in."""
    row = next(row for row in store.requests if row["fallbacks"])
    await opened(page, store, url, row, CAUSE)
    shown = await page.run(
        "[...document.querySelectorAll('.attempts li')].map((li) =>"
        " [...li.querySelectorAll('.seg')].map((seg) => seg.dataset.part + (seg.matches('.broken') ? '!' : '')))"
    )
    assert shown == [["prefill.hop", "prefill.queue", "prefill.forward!"], []]
    assert await page.run("document.querySelectorAll('.to-first .broken').length") == 0


async def test_the_second_request_of_a_clients_trace_is_the_one_shown(page: Page, store: Store, url: str) -> None:
    """A trace of the client's own with two requests opens on the one that was clicked, with its spans alone."""
    first, second = samples.request(1), samples.request(2, "write")
    second["trace_id"] = first["trace_id"]
    both = samples.trace(first)
    for span in samples.trace(second)["spans"]:
        parent = f"b{span['parent_id'][1:]}" if span["parent_id"] else ""
        both["spans"].append(span | {"span_id": f"b{span['span_id'][1:]}", "parent_id": parent})
    store.requests, store.traces = [second, first], {first["trace_id"]: both}
    await page.goto(f"{url}/#/")
    await page.click(".rows .row:first-child a")
    await page.until("document.querySelectorAll('.spans li').length > 3")
    assert await page.text("h1") == second["request_id"]
    assert "WRITE" in await page.text(".facts")
    assert await page.run("document.querySelectorAll(\"[data-span='pdserve.request']\").length") == 1


async def test_a_trace_that_is_not_here_can_be_looked_for_again(page: Page, store: Store, url: str) -> None:
    """A missing trace is explained; when it has come, the same view shows it."""
    row = samples.request(77)
    await page.goto(f"{url}/#/request/{row['trace_id']}")
    assert "No such trace" in await page.text(".empty h2")
    store.traces[row["trace_id"]] = samples.trace(row)
    await page.click(".empty button")
    await page.until("document.querySelectorAll('.spans li').length > 5")
    assert await page.run("document.querySelector('.json').pathname") == f"/api/traces/{row['trace_id']}"
    page.complaints.clear()  # the browser logs the 404 itself
