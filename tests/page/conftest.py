"""The page in a real browser; what is fake: the API behind it, whose answers are canned."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import pytest

from tests.page import samples
from tests.page.browser import NoBrowser, Page, started
from tests.page.stub import Store, serving


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One browser for all tests. Without one they fail: a page that nobody looked at is not tested."""
    with ExitStack() as stack:
        missing = ""
        try:
            address = stack.enter_context(started(tmp_path_factory.mktemp("browser")))
        except NoBrowser as error:
            missing = str(error)
        if missing:
            pytest.fail(missing, pytrace=False)
        yield address


@asynccontextmanager
async def tab(address: str, deadline: float = 10.0) -> AsyncIterator[Page]:
    """A new tab of a running browser."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Page(socket, deadline)
        listening = asyncio.create_task(page.listen())
        try:
            await page.open()
            yield page
            await page.aclose()
        finally:
            await socket.close()
            await listening


@pytest.fixture
async def page(browser: str, url: str) -> AsyncIterator[Page]:
    """A tab of 1280 by 900; its test fails if the page makes the browser complain. It asks for `url` so that the tab is
    closed before its server: a page that still loads would complain of that."""
    async with tab(browser) as opened:
        await opened.size(1280)
        yield opened
        assert opened.complaints == []


@pytest.fixture
def store() -> Store:
    """40 requests of all kinds with their traces, and an hour of parts."""
    rows = samples.many()
    cause = "PEER_LOST: the prefill engine has gone"
    return Store(
        requests=rows,
        traces={row["trace_id"]: samples.trace(row, cause) for row in rows},
        parts={mode: samples.parts(mode) for mode in ("", "read", "write", "none")},
    )


@pytest.fixture
async def url(store: Store) -> AsyncIterator[str]:
    """Where the page is."""
    async with serving(store) as address:
        yield address
