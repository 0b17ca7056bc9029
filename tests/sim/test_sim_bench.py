"""The bench against a whole fleet: what it measures is what happened."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest

from pdserve.bench.ask_kvd import ask
from pdserve.bench.endpoint import Asking, Endpoint
from pdserve.bench.measure import Measurement, Setup
from pdserve.bench.over_grpc import GrpcEndpoint
from pdserve.bench.over_http import HttpEndpoint
from pdserve.bench.plan import Wanted, make
from pdserve.bench.results import Machine, Record, Results
from pdserve.bench.runner import Brake
from pdserve.bench.slo import Slo
from pdserve.bench.transport import Expected
from pdserve.bench.workload.lengths import Span
from pdserve.bench.workload.prompts import Sharing
from pdserve.costmodel import CostModel
from tests.sim.fleet import Fleet, Launch
from tests.unit.bench.virtual import Quiet
from tests.waiting import WAIT_S, until

Api = Literal["grpc", "http"]
apis = pytest.mark.parametrize("api", ["grpc", "http"])


@contextlib.asynccontextmanager
async def reached(fleet: Fleet, api: Api, asking: Asking) -> AsyncIterator[Endpoint]:
    """One of the proxy's faces, as an endpoint."""
    where = fleet.proxy.addresses
    endpoint: Endpoint
    if api == "grpc":
        endpoint = GrpcEndpoint(where.grpc, asking)
    else:
        endpoint = await HttpEndpoint.open(f"http://{where.http}/v1", asking)
    async with contextlib.aclosing(endpoint):
        yield endpoint


async def measure(
    fleet: Fleet,
    api: Api,
    wanted: Wanted,
    mode: str = "",
    watch: Callable[[Record], None] = lambda _: None,
    begin: Callable[[], None] = lambda: None,
) -> tuple[Results, Quiet]:
    """The results, and what the user was told; kvd is asked."""
    asking = Asking(mode=mode, timeout=WAIT_S)
    setup = Setup(
        "here", api, asking, Expected("shm"), Machine("cpu", 2, 8.0, "Linux"),
        ask_kvd=lambda: ask(f"unix:{fleet.kvd.socket}", WAIT_S),
    )  # fmt: skip
    view = Quiet()
    view.on_begin, view.on_ended = begin, watch
    async with reached(fleet, api, asking) as endpoint:
        return await Measurement(make(wanted), endpoint, setup, Brake(), view).run(), view


def wanted(**more: Any) -> Wanted:
    """Twelve requests of 40 to 80 tokens in and 6 to 9 out, four at a time."""
    usual: dict[str, Any] = {
        "prompt": Span(40, 80), "output": Span(6, 9), "requests": 12, "concurrency": (4,), "slo": Slo(ttft=WAIT_S),
    }  # fmt: skip
    return Wanted(**(usual | more))


@apis
@pytest.mark.parametrize("mode", ["read", "write"])
async def test_lengths_and_facts_are_those_that_were_asked_for(fleet: Fleet, api: Api, mode: str) -> None:
    """Every prompt and answer has its length, over both faces and in both modes; a gap for each further token."""
    plan = make(wanted())
    results, view = await measure(fleet, api, wanted(), mode)
    (run,) = results.runs
    assert not results.partial
    assert [(record.prompt_tokens, record.output_tokens) for record in run.requests] == [
        (ask.prompt_tokens, ask.output_tokens) for ask in plan.asks
    ]
    assert {(record.mode, record.transport, record.missed) for record in run.requests} == {(mode, "shm", ())}
    assert all(len(record.itls) == record.output_tokens - 1 for record in run.requests)
    assert run.summary.attainment == 1.0
    assert (results.target.mode, results.target.transport, results.target.model) == (mode, "shm", "sim")
    assert len(results.target.engines) == (2 if api == "grpc" else 0)
    assert view.said == [f"sim: mode {mode}, the KV cache moves over shm (compiled copies)"]


@apis
async def test_the_parts_of_ttft_come_from_the_proxy(fleet: Fleet, api: Api) -> None:
    """They and what is unattributed are not more than the client's own TTFT, to the rounding of each."""
    results, _ = await measure(fleet, api, wanted())
    for record in results.runs[0].requests:
        assert "prefill.forward" in record.parts
        told = sum(record.parts.values()) + record.unattributed
        assert record.ttft is not None
        assert 0 < told <= record.ttft + 1e-6 * (len(record.parts) + 2)


@apis
async def test_requests_go_out_when_due_though_nobody_answers(fleet: Fleet, api: Api) -> None:
    """Prefill stands still; all twelve are at the proxy before the first has an answer, none sent early."""
    gate = fleet.prefills[0].steps
    rate = wanted(concurrency=(), rates=(200.0,))
    measuring = asyncio.create_task(measure(fleet, api, rate, begin=gate.shut))  # the probe is over by then

    def busy() -> int:
        topology = fleet.proxy.inference.topology()
        return topology.in_flight + topology.queued

    await until(lambda: busy() == 12)
    gate.open()
    results, _ = await measuring
    records = results.runs[0].requests
    assert [record.index for record in sorted(records, key=lambda record: record.sent)] == list(range(12))
    assert all(record.sent >= record.due for record in records)


@apis
async def test_the_prefix_cache_finds_what_the_workload_shares(fleet: Fleet, api: Api) -> None:
    """One at a time, 20 prompts of 160 tokens: half of all is asked for, in whole blocks, and half is found."""
    shared = wanted(prompt=Span(160, 160), requests=20, concurrency=(1,), sharing=Sharing(0.5, 1, 16))
    results, _ = await measure(fleet, api, shared)
    records = results.runs[0].requests
    assert [record.cached_tokens for record in records] == [0] + [80] * 19


@apis
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_dies_mid_run_leaves_partial_results(fleet: Fleet, api: Api, role: str) -> None:
    """The only engine of its role dies when five requests are done: those are kept, the rest is not sent."""
    service = (fleet.prefills if role == "prefill" else fleet.decodes)[0]
    killing: list[asyncio.Task[None]] = []

    def watch(record: Record) -> None:
        if record.index == 4:
            killing.append(asyncio.create_task(fleet.kill(service)))

    results, _ = await measure(fleet, api, wanted(requests=200, concurrency=(1,)), watch=watch)
    await killing[0]
    (run,) = results.runs
    assert results.partial
    assert run.partial
    assert run.summary.completed >= 5
    assert run.summary.failed == 10
    assert len(run.requests) == run.summary.completed + 10 < 200
    assert "10 requests in a row failed" in results.why_partial
    reasons = {record.error.reason for record in run.requests if record.error}
    assert reasons <= {"ENGINE_DIED", "NO_ENGINES", "PRODUCER_FAILED", "CONSUMER_FAILED", "DRAINING"}


@apis
async def test_an_answer_has_one_stamp_a_token_where_steps_take_time(launch: Launch, api: Api) -> None:
    """A decode step of 20 ms: no gap in the middle of the answers is shorter than half of it at the median."""
    fleet = await launch(cost=CostModel(decode_base=0.02))
    results, _ = await measure(fleet, api, wanted(requests=4))
    itl = results.runs[0].summary.itl
    assert itl is not None
    assert itl.p50 >= 0.01
