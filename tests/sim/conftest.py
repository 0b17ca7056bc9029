"""A whole fleet in the test's process: kvd, proxy, prefill and decode services on simulated engines.

Real: the proxy's two faces, every gRPC, ZMQ and Unix socket, the registration, the KV memory and its
copies. Simulated: the model. Engines check every byte that they get, and `Gate`s let a test stop an
engine's steps or the link at a point it names, so that races are ordered and not slept for.

At the end of every test nothing may be left: see `Fleet.close`.
"""

import asyncio
import logging as levels
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from pdserve.engine.sim import SimConfig
from pdserve.kvd.limits import Limits
from pdserve.proxy.types import OnFailure
from pdserve.runtime.telemetry.span import Export
from tests.sim.deployment import LONG, STEADY
from tests.sim.fleet import Fleet, Launch

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))

_LONGEST = ("test_sim_compare.py", "test_sim_start.py", "test_sim_profile.py", "test_sim_storm.py")
"""They start processes, or wait for a clock."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first. Of several workers one begins with them, file by file, and the others take from its
    end: nobody waits for them at the end of the run, and what a file prepares once is not prepared by each worker."""
    here = Path(__file__).parent
    order = {here / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    """A failed test shows what every part said, from PDSERVE_TEST_LOG up: "info", or "debug" for all."""
    before = structlog.get_config()
    level = getattr(levels, os.environ.get("PDSERVE_TEST_LOG", "info").upper())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    yield
    structlog.configure(**before)


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Starts a fleet, and checks and ends it after the test.

    `prefills`, `decodes`: engines; `bandwidth`: bytes a second of a simulated link, None copies as
    kvd does; `limits`, `grace`: kvd's; `proxy`: its settings, `traces` takes its spans; `beat_seconds`; the rest
    is SimConfig.
    """
    async with AsyncExitStack() as closing:

        async def start(
            *,
            prefills: int = 1,
            decodes: int = 1,
            bandwidth: float | None = None,
            limits: Limits = LONG,
            grace: float = 2.0,
            beat_seconds: float = STEADY,
            proxy: dict[str, Any] | None = None,
            traces: Export | None = None,
            **sim: Any,
        ) -> Fleet:
            stack = AsyncExitStack()
            fleet = Fleet(stack, SimConfig(**sim), beat_seconds)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sim"))
            try:
                await fleet.start_kvd(Path(folder), limits, bandwidth, grace)
                await fleet.start_proxy({"on_failure": OnFailure.FAIL} | (proxy or {}), traces)
                for role, count in (("prefill", prefills), ("decode", decodes)):
                    await asyncio.gather(*(fleet.host(role) for _ in range(count)))
                await fleet.start_clients()
            except BaseException:
                await stack.aclose()
                raise
            closing.push_async_callback(fleet.close)
            return fleet

        yield start


@pytest.fixture
async def fleet(launch: Launch) -> Fleet:
    """One prefill and one decode engine."""
    return await launch()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """What a test draws; the same for the same seed."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def prompt(rng: random.Random) -> Callable[[int], tuple[int, ...]]:
    """`prompt(n)`: n tokens that were never seen before."""
    return lambda n: tuple(rng.randrange(256) for _ in range(n))
