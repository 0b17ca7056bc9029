"""What a fleet's traces say: every millisecond in the part that spent it, every end with its cause.

That a delay is in the part in which it was: test_sim_traces_control.py.
"""

import asyncio
import io
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import structlog

from pdserve.costmodel import CostModel
from pdserve.rpc import errors
from pdserve.runtime import log
from pdserve.runtime.failpoints import FAILPOINTS, Point
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.export import ExportSettings, OtlpExport
from pdserve.runtime.telemetry.span import Span
from tests.sim.fleet import Launch, Prompt
from tests.unit.telemetry.collector import Collector
from tests.unit.telemetry.trace import HANDED_OVER, Trace

BOTH = pytest.mark.parametrize("mode", ["read", "write"])
SHOWN_S, ELSEWHERE_S = 0.045, 0.010
"""Of a delay of 50 ms: what the span that has it lasts at least, and what another one is longer at most."""
RUNS = 20
"""Most tries of what is said of times, as the box may be busy: one is good, but where it never could be."""
COST = CostModel(0.004, 0.0, 0.002, 0.0, 0.0, 0.0, 0.0)
"""A step with a prompt takes 4 ms, one without 2 ms: no part is lost in the noise of microseconds."""


class Traces:
    """What the proxy hands out, one list of spans a trace."""

    def __init__(self) -> None:
        self.all: list[Sequence[Span]] = []

    def __call__(self, spans: Sequence[Span]) -> None:
        self.all.append(spans)

    def only(self) -> "Trace":
        """The one that there is."""
        assert len(self.all) == 1
        return Trace(self.all[0])


@pytest.fixture
def traces() -> Traces:
    """Takes them."""
    return Traces()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No failpoint outlives its test."""
    yield
    FAILPOINTS.clear()


@BOTH
async def test_two_hundred_requests_explain_themselves(
    launch: Launch, prompt: Prompt, rng: random.Random, traces: Traces, mode: str
) -> None:
    """Twenty at a time over two pairs: each leaves at most max(1 ms, 1 %) of its TTFT unexplained, has every part as a
    figure and as a span where it is long enough to be one, and says the numbers that the client got."""
    fleet = await launch(traces=traces, prefills=2, decodes=2, cost=COST)
    for _ in range(10):
        asked = [fleet.ask(prompt(rng.randrange(3, 200)), mode=mode, max_tokens=4) for _ in range(20)]
        done = {answer.trace_id: answer for answer in await asyncio.gather(*asked)}
        await fleet.until(lambda: len(traces.all) == 20)
        for trace in map(Trace, traces.all):
            trace.check()
            answer = done[trace.root.trace_id]
            assert trace.root.attributes[names.MODE] == mode
            assert trace.figure(names.UNATTRIBUTED) <= max(0.001, 0.01 * trace.figure(names.TTFT)), trace.parts()
            assert trace.parts() == answer.timings.parts
            assert list(trace.parts()) == list(HANDED_OVER)
            assert trace.figure(names.TTFT) == answer.timings.ttft_seconds
            assert trace.figure(names.KV_BYTES) == answer.kv_bytes
            for part, seconds in trace.parts().items():
                drawn = trace.named(names.part_span(part))
                assert len(drawn) == (1 if seconds > 4e-6 else len(drawn)) <= 1, (part, seconds)
                if drawn:
                    assert (drawn[0].end_ns - drawn[0].start_ns) / 1e9 == pytest.approx(seconds, abs=5e-6)
            assert trace.one(names.ATTEMPT).status.failed is False
            assert trace.one(names.STREAM).service.instance_id == answer.decode_engine_id
        traces.all.clear()


async def test_kvd_is_below_the_wait(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """READ over a slow link: the copy is below kv.wait and takes nearly all of it. WRITE: what was pushed while prefill
    computed is below prefill.forward, and the wait for the rest links to it."""
    fleet = await launch(traces=traces, layers=8, token_budget=64, bandwidth=8 * 16 * 128 / 0.1, cost=COST)
    shares: list[float] = []
    while not shares or (max(shares) <= 0.9 and len(shares) < RUNS):
        traces.all.clear()
        await fleet.ask(prompt(256), mode="read", max_tokens=2)
        await fleet.until(lambda: len(traces.all) == 1)
        read = traces.only()
        read.check()
        wait, copy = read.one("pdserve.kv.wait"), read.one(names.KVD_COPY)
        shares.append((copy.end_ns - copy.start_ns) / (wait.end_ns - wait.start_ns))
    assert max(shares) > 0.9, shares
    assert [span.name for span in read.spans if span.service.name == names.KVD][-1] == names.KVD_COPY, "told at once"
    assert copy.parent_id == wait.span_id
    assert (copy.service.name, copy.attributes[names.TRANSPORT]) == (names.KVD, "sim")
    assert copy.attributes[names.KV_BYTES] == 16 * 8 * 128
    assert not read.named(names.KVD_PUSH)
    traces.all.clear()
    prefill = fleet.prefills[0]
    prefill.steps.shut()
    asked = asyncio.create_task(fleet.ask(prompt(256), mode="write", max_tokens=2))
    await prefill.steps.pass_one()
    await fleet.until(lambda: fleet.landed() > 0)  # a layer of it, while prefill stands before the next
    prefill.steps.open()
    await asked
    await fleet.until(lambda: len(traces.all) == 1)
    write = traces.only()
    write.check()
    push, copy = write.one(names.KVD_PUSH), write.one(names.KVD_COPY)
    assert write.by_id[push.parent_id].name == "pdserve.prefill.forward"
    assert [link.span_id for link in copy.links] == [push.span_id]
    assert write.figure(names.raw("write")) > 0
    moved = [span.attributes[names.KV_BYTES] for span in (push, copy)]
    assert sum(int(str(count)) for count in moved) == 16 * 8 * 128


async def test_a_retried_request_shows_both_attempts(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """The first ends with ERROR and the cause, the second is its sibling and has the parts; the root is well."""
    fleet = await launch(traces=traces, prefills=2)
    FAILPOINTS.arm(Point.PREFILL_RECEIVED, "1*error(ENGINE_DIED)")
    answer = await fleet.ask(prompt(100), mode="read")
    assert answer.fallbacks == 1
    await fleet.until(lambda: len(traces.all) == 1)
    trace = traces.only()
    trace.check()
    first, second = trace.named(names.ATTEMPT)
    assert (first.status.failed, first.status.message.split(":")[0]) == (True, "ENGINE_DIED")
    assert (second.status.failed, trace.root.status.failed) == (False, False)
    assert first.parent_id == second.parent_id == trace.root.span_id
    assert trace.one("pdserve.prefill.forward").parent_id == second.span_id
    assert trace.parts()[names.RETRY] > 0
    assert first.attributes[names.PREFILL_ENGINE] != second.attributes[names.PREFILL_ENGINE]
    assert first.attributes[names.TRANSFER_ID] != second.attributes[names.TRANSFER_ID]


async def test_a_failed_request_ends_with_its_cause(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """ERROR at the root and at the attempt, with the reason that the client got; no TTFT is made up."""
    fleet = await launch(traces=traces, proxy={"retries": 0})
    FAILPOINTS.arm(Point.DECODE_RECEIVED, "error(CONSUMER_FAILED)")
    with pytest.raises(errors.ConsumerFailed):
        await fleet.ask(prompt(100), mode="read")
    await fleet.until(lambda: len(traces.all) == 1)
    trace = traces.only()
    trace.check()
    assert trace.root.attributes[names.ERROR_TYPE] == "CONSUMER_FAILED"
    assert (trace.root.status.failed, trace.one(names.ATTEMPT).status.failed) == (True, True)
    assert names.TTFT not in trace.root.attributes
    assert trace.named("pdserve.prefill.forward"), "what prefill had done is there"


async def test_a_cancelled_request_is_an_error_of_that_name(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """The client leaves in the middle: root, attempt and stream say CANCELLED, and TTFT is what it was."""
    fleet = await launch(traces=traces)
    fleet.decodes[0].steps.shut()
    stream = fleet.stream(prompt(100), mode="read", max_tokens=50)
    reading = asyncio.ensure_future(anext(stream))
    await fleet.decodes[0].steps.pass_one(2)
    await reading
    await fleet.decodes[0].steps.reached()
    await stream.aclose()
    await fleet.until(lambda: len(traces.all) == 1)
    fleet.decodes[0].steps.open()
    trace = traces.only()
    trace.check()
    assert trace.root.attributes[names.OUTCOME] == "cancelled"
    assert trace.root.attributes[names.ERROR_TYPE] == "CANCELLED"
    said = [
        span.status.message.split(":")[0] for span in (trace.root, trace.one(names.ATTEMPT), trace.one(names.STREAM))
    ]
    assert said == ["CANCELLED"] * 3
    assert trace.figure(names.TTFT) > 0


async def test_word_on_its_way_is_no_copy(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """WRITE whose offer is 100 ms late: the bytes are there, the wait is kvd's, and it is drawn as notify."""
    fleet = await launch(traces=traces, cost=COST)
    await fleet.ask(prompt(100), mode="write", max_tokens=2)  # opens the session
    await fleet.until(lambda: len(traces.all) == 1)
    others: list[float] = []
    while not others or (min(others) >= ELSEWHERE_S and len(others) < RUNS):
        traces.all.clear()
        FAILPOINTS.arm(Point.CONNECTOR_OFFER, "1*delay(100)")
        await fleet.ask(prompt(100), mode="write", max_tokens=2)
        await fleet.until(lambda: len(traces.all) == 1)
        trace = traces.only()
        trace.check()
        notify = trace.one(names.KVD_NOTIFY)
        assert trace.by_id[notify.parent_id].name == "pdserve.kv.wait"
        assert (notify.end_ns - notify.start_ns) / 1e9 >= SHOWN_S
        copied = sum(span.end_ns - span.start_ns for span in trace.named(names.KVD_COPY)) / 1e9
        others.append(max(copied, trace.figure(names.raw("write"))))
    assert min(others) < ELSEWHERE_S, others


@BOTH
async def test_a_continued_answer_goes_on_as_an_attempt(
    launch: Launch, prompt: Prompt, traces: Traces, mode: str
) -> None:
    """Decode dies in the middle: the stream ends with the cause, the second attempt follows it, TTFT is the first's."""
    fleet = await launch(traces=traces)
    doomed = fleet.decodes[0]
    doomed.steps.shut()
    stream = fleet.stream(prompt(100), mode=mode, max_tokens=12)

    async def read() -> Any:
        async for _ in stream:
            pass
        return await stream.completion()

    reading = asyncio.create_task(read())
    await doomed.steps.pass_one(3)
    await doomed.steps.reached()
    await fleet.host("decode")
    await fleet.kill(doomed)
    assert (await reading).continuations == 1
    await fleet.until(lambda: len(traces.all) == 1)
    trace = traces.only()
    trace.check()
    first, second = trace.named(names.ATTEMPT)
    broken, _ = trace.named(names.STREAM)
    assert broken.status.message.startswith("ENGINE_DIED")
    assert first.end_ns < broken.start_ns < broken.end_ns < second.start_ns
    assert not second.status.failed
    assert trace.figure(names.CONTINUATIONS) == 1
    assert len(trace.named("pdserve.prefill.forward")) == 2
    assert trace.root.end_ns - trace.root.start_ns > (first.end_ns - trace.root.start_ns)
    assert trace.figure(names.TTFT) == pytest.approx((first.end_ns - trace.root.start_ns) / 1e9, abs=1e-5)


@BOTH
async def test_every_line_of_a_request_says_what_it_is_about(launch: Launch, prompt: Prompt, mode: str) -> None:
    """The JSON log of a request with a trace of its caller's, all services together: each line that any of its ids is
    in has request_id, trace_id and transfer_id; kvd, which knows no request, has the transfer."""
    said = io.StringIO()
    before = structlog.get_config()
    log.setup("fleet", log.LogFormat.JSON, log.LogLevel.INFO, said)
    try:
        fleet = await launch()
        FAILPOINTS.arm(Point.DECODE_TOKEN, "delay(1)")
        FAILPOINTS.arm(Point.PROXY_TOKEN, "delay(1)")
        FAILPOINTS.arm(Point.PREFILL_READY, "delay(1)")
        caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
        await fleet.ask(prompt(100), mode=mode, request_id="the-request", traceparent=caller)
        await fleet.settled()
    finally:
        structlog.configure(**before)
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    (ended,) = [line for line in lines if line["event"] == "request_ended"]
    transfer = ended["attempts"][0]["transfer_id"]
    assert (ended["request_id"], ended["trace_id"]) == ("the-request", "ab" * 16)
    about = [line for line in lines if transfer in json.dumps(line) or "the-request" in json.dumps(line)]
    events = {line["event"] for line in about}
    assert {"request_ended", "prefill_ended", "decode_ended", "transfer_end", "failpoint"} <= events
    for line in about:
        if line["event"] == "transfer_end":  # kvd's
            assert (line["transfer_id"], "request_id" in line) == (transfer, False)
            continue
        assert (line["request_id"], line["trace_id"]) == ("the-request", "ab" * 16), line
        if line["event"] == "failpoint" and line["point"] == "proxy.token":
            continue  # the proxy's request has one transfer an attempt; its attempts name theirs
        if line["event"] != "request_ended":
            assert line["transfer_id"] == transfer, line
    points = {line["point"] for line in about if line["event"] == "failpoint"}
    assert points == {"decode.token", "proxy.token", "prefill.ready"}


async def test_requests_do_not_wait_for_a_collector(
    launch: Launch, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over OTLP: a trace arrives whole, each span with its service's resource. The collector is killed in the middle:
    requests go on as before, counters rise, and what is traced after its return arrives again."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector = Collector()
    await collector.start()
    exporter = OtlpExport(collector.endpoint, ExportSettings(queue=100, batch=50, delay=0.02))
    try:
        fleet = await launch(traces=exporter.send, prefills=2, decodes=2)
        answer = await fleet.ask(prompt(100), mode="read")
        await collector.until(lambda: any(one.span.name == names.STREAM for one in collector.spans))  # the last
        engines = {service.engine_id for service in (*fleet.prefills, *fleet.decodes)}
        services = {one.resource["service.name"] for one in collector.spans}
        assert services == {names.PROXY, names.PREFILL, names.DECODE, names.KVD}
        assert {one.span.trace_id.hex() for one in collector.spans} == {answer.trace_id}
        for one in collector.spans:
            if one.resource["service.name"] in (names.PREFILL, names.DECODE):
                assert one.resource["service.instance.id"] in engines
        (spans,) = collector.traces().values()
        trace = Trace(spans)
        trace.check()
        assert trace.figure(names.TTFT) == answer.timings.ttft_seconds
        assert abs(trace.root.start_ns / 1e9 - time.time()) < 60

        await collector.kill()
        for _ in range(3):
            answers = await asyncio.gather(*(fleet.ask(prompt(50), mode="write") for _ in range(10)))
            assert all(len(answer.token_ids) == 8 for answer in answers)
        await fleet.until(lambda: exporter.counts.failed > 0 and exporter.counts.dropped > 0)
        await collector.start()
        sent = exporter.counts.exported

        async def again() -> bool:
            await fleet.ask(prompt(50), mode="read")
            return exporter.counts.exported > sent

        async with asyncio.timeout(20):
            while not await again():
                pass
    finally:
        await exporter.aclose()
        await collector.kill()


async def test_an_unsampled_caller_is_heeded_until_something_fails(
    launch: Launch, prompt: Prompt, traces: Traces
) -> None:
    """The legs hear the caller's flag; a good request leaves no trace, a failed one does, below the caller's span."""
    fleet = await launch(traces=traces, proxy={"retries": 0})
    caller = f"00-{'ab' * 16}-{'cd' * 8}-00"
    await fleet.ask(prompt(50), mode="read", traceparent=caller)
    FAILPOINTS.arm(Point.PREFILL_RECEIVED, "error(PRODUCER_FAILED)")
    with pytest.raises(errors.ProducerFailed):
        await fleet.ask(prompt(50), mode="read", traceparent=caller)
    await fleet.until(lambda: len(traces.all) == 1)
    root = traces.only().root
    assert (root.trace_id, root.parent_id, root.remote_parent) == ("ab" * 16, "cd" * 8, True)
    assert root.status.failed
