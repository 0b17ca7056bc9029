"""What a fleet's traces say of failures: the part in which an attempt failed is the one that was at fault."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from pdserve.costmodel import CostModel
from pdserve.kvd.limits import Limits
from pdserve.kvd.transport.sim import Fault
from pdserve.rpc import errors
from pdserve.runtime.failpoints import FAILPOINTS, Point
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Span
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.unit.telemetry.trace import Trace

ONCE = {"retries": 0}
BOTH = pytest.mark.parametrize("mode", ["read", "write"])
LINK = 1e9
"""Bytes a second of the simulated link, which has a failpoint."""
COST = CostModel(0.02, 0.0, 0.002, 0.0, 0.0, 0.0, 0.0)
"""A step with a prompt takes 20 ms."""


class Traces:
    """What the proxy hands out, one list of spans a trace."""

    def __init__(self) -> None:
        self.all: list[Sequence[Span]] = []

    def __call__(self, spans: Sequence[Span]) -> None:
        self.all.append(spans)

    async def only(self, fleet: Fleet) -> Trace:
        """The one that there is, once it has come; checked."""
        await fleet.until(lambda: len(self.all) == 1)
        trace = Trace(self.all[0])
        trace.check()
        return trace


@pytest.fixture
def traces() -> Traces:
    """Takes them."""
    return Traces()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No failpoint outlives its test."""
    yield
    FAILPOINTS.clear()


def failed_in(trace: Trace) -> tuple[str, tuple[str, ...]]:
    """The part in which the request failed and those that it may have come to, as root, attempt and span say it; the
    parts sum to the time to the failure."""
    root, attempt = trace.root.attributes, trace.named(names.ATTEMPT)[-1]
    part, or_later = root[names.FAILED_IN], root.get(names.FAILED_OR_LATER, ())
    assert isinstance(part, str)
    assert isinstance(or_later, tuple)
    assert (attempt.attributes[names.FAILED_IN], attempt.attributes.get(names.FAILED_OR_LATER, ())) == (part, or_later)
    broken = trace.named(names.part_span(part))[-1]
    assert broken.parent_id == attempt.span_id
    assert (broken.status, broken.end_ns) == (attempt.status, attempt.end_ns)
    assert broken.attributes.get(names.FAILED_OR_LATER, ()) == or_later
    assert names.TTFT not in root
    parts = {name: float(str(value)) for name, value in root.items() if name.startswith(f"{names.FAILED_AFTER}.")}
    assert round(sum(parts.values()) * 1e9) == round(trace.figure(names.FAILED_AFTER) * 1e9)
    assert parts[names.FAILED_UNATTRIBUTED] == 0, "nothing on the way was left unstamped"
    return part, or_later


FAULTS = [
    (Point.PREFILL_RECEIVED, "1*error(PRODUCER_FAILED)", errors.ProducerFailed, "prefill.queue", ()),
    (Point.SIM_ARRIVED, "1*error(ENGINE_DIED)", errors.EngineDied, "prefill.queue", ("prefill.forward",)),
    (Point.PROXY_BETWEEN, "1*error(UNAVAILABLE)", errors.Unavailable, "proxy.serialization", ()),
    (Point.DECODE_RECEIVED, "1*error(CONSUMER_FAILED)", errors.ConsumerFailed, "decode.admit", ()),
    (Point.SIM_LANDED, "1*error(ENGINE_DIED)", errors.EngineDied, "decode.queue", ("decode.first_step",)),
    (Point.DECODE_TEXT, "1*error(CONSUMER_FAILED)", errors.ConsumerFailed, "detokenize", ()),
    (Point.DECODE_TOKEN, "1*error(CONSUMER_FAILED)", errors.ConsumerFailed, "encode", ()),
]


@pytest.mark.parametrize(("point", "terms", "error", "part", "or_later"), FAULTS, ids=[str(f[0].value) for f in FAULTS])
async def test_a_fault_shows_up_where_it_was(
    launch: Launch,
    prompt: Prompt,
    traces: Traces,
    point: Point,
    terms: str,
    error: type[errors.PdserveError],
    part: str,
    or_later: tuple[str, ...],
) -> None:
    """READ: the part whose end was not reached lasts until the failure and has its reason; the parts before it are
    those of the stamps that the services had taken; what an engine has not told is named, and no part is made of it."""
    fleet = await launch(traces=traces, proxy=ONCE, bandwidth=LINK)
    FAILPOINTS.arm(point, terms)
    with pytest.raises(error):
        await fleet.ask(prompt(100), mode="read")
    if error is errors.EngineDied:
        (fleet.prefills if part.startswith("prefill") else fleet.decodes)[0].gone = True
    trace = await traces.only(fleet)
    assert failed_in(trace) == (part, or_later)
    below = [span.name for span in trace.spans if span.parent_id == trace.one(names.ATTEMPT).span_id]
    assert below[-1] == names.part_span(part)


def of_kvd(trace: Trace) -> list[tuple[str, bool]]:
    """kvd's spans below the wait that failed, in order, each with whether it is the one that did not end; it has the
    wait's reason and ends with it."""
    wait = trace.one("pdserve.kv.wait")
    below = [span for span in trace.spans if span.service.name == names.KVD and span.parent_id == wait.span_id]
    assert [span.status for span in below if span.status.failed] in ([], [wait.status])
    assert below[-1].end_ns == wait.end_ns
    return [(span.name, span.status.failed) for span in below]


async def test_a_fault_of_the_transport(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """Decode had its blocks and the link fails: kv.wait, whose beginning kvd has told, as when it began the copy, which
    did not end."""
    fleet = await launch(traces=traces, proxy=ONCE, bandwidth=LINK)
    FAILPOINTS.arm(Point.KVD_LINK, "1*error(TRANSFER_FAILED)")
    with pytest.raises(errors.TransferFailed):
        await fleet.ask(prompt(100), mode="read")
    trace = await traces.only(fleet)
    assert failed_in(trace) == ("kv.wait", ())
    assert trace.one("pdserve.decode.admit").status.failed is False
    assert of_kvd(trace)[-1] == (names.KVD_COPY, True)
    copy = trace.one(names.KVD_COPY)
    assert (copy.attributes[names.KV_BYTES], copy.attributes[names.TRANSPORT]) == (0, "sim")


@BOTH
async def test_a_wait_that_expired(launch: Launch, prompt: Prompt, traces: Traces, mode: str) -> None:
    """A copy hangs until kvd gives the hand-over up: nearly all of the wait is in kvd.copy, which has the reason. In
    WRITE, where it is the second layer's, what was pushed is below prefill's forward pass, and well."""
    limits = Limits(transfer=1.5, fence=0.1)
    fleet = await launch(traces=traces, proxy=ONCE, bandwidth=LINK, limits=limits, layers=4, cost=COST)
    fleet.may_expire = True
    steps = fleet.prefills[0].steps
    steps.shut()
    asked = asyncio.ensure_future(fleet.ask(prompt(100), mode=mode))
    await steps.reached()
    if mode == "write":  # the first layer's copy is done before the others are begun
        await fleet.until(lambda: fleet.consumers() == ["reserved"])
        await steps.pass_one()
        await fleet.until(lambda: fleet.landed() > 0)
    fleet.faults.script = [Fault.STALL]
    steps.open()
    with pytest.raises(errors.TransferExpired):
        await asked
    trace = await traces.only(fleet)
    assert failed_in(trace) == ("kv.wait", ())
    assert of_kvd(trace)[-1] == (names.KVD_COPY, True)
    wait, copy = trace.one("pdserve.kv.wait"), trace.one(names.KVD_COPY)
    assert copy.status.message.startswith("TRANSFER_EXPIRED")
    assert copy.end_ns - copy.start_ns > 0.9 * (wait.end_ns - wait.start_ns)
    pushed = [span for span in trace.spans if span.name == names.KVD_PUSH]
    assert len(pushed) == (mode == "write")
    for push in pushed:
        assert trace.by_id[push.parent_id].name == "pdserve.prefill.forward"
        assert not push.status.failed
        assert int(str(push.attributes[names.KV_BYTES])) > 0


async def test_a_prefill_that_dies_under_the_copy(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """READ: kvd, which saw it die, says how far the hand-over had come: the copy did not end."""
    fleet = await launch(traces=traces, proxy=ONCE, bandwidth=LINK)
    fleet.link.shut()
    asked = asyncio.ensure_future(fleet.ask(prompt(100), mode="read"))
    await fleet.link.reached()
    killing = asyncio.ensure_future(fleet.kill(fleet.prefills[0]))
    await fleet.until(lambda: fleet.producers() == ["fencing"])
    fleet.link.open()
    with pytest.raises(errors.PdserveError):
        await asked
    await killing
    trace = await traces.only(fleet)
    assert failed_in(trace) == ("kv.wait", ())
    assert of_kvd(trace)[-1] == (names.KVD_COPY, True)


async def test_an_engine_that_is_killed_in_its_forward_pass(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """The service has outlived its engine for long enough to say that it had the request; how far the engine had come
    is not known any more, and is not made up."""
    fleet = await launch(traces=traces, proxy=ONCE)
    doomed = fleet.prefills[0]
    doomed.steps.shut()
    asked = asyncio.ensure_future(fleet.ask(prompt(100), mode="read"))
    await doomed.steps.reached()
    await fleet.kill(doomed)
    with pytest.raises(errors.EngineDied):
        await asked
    assert failed_in(await traces.only(fleet)) == ("prefill.queue", ("prefill.forward",))


async def test_a_decode_that_is_killed_while_prefill_waits(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """WRITE: decode had its blocks and prefill had computed nothing, which it has not said, as it was let go. No time
    goes to the wait for the KV, which had not begun."""
    fleet = await launch(traces=traces, proxy=ONCE)
    fleet.prefills[0].steps.shut()
    asked = asyncio.ensure_future(fleet.ask(prompt(100), mode="write"))
    await fleet.prefills[0].steps.reached()
    await fleet.kill(fleet.decodes[0])
    with pytest.raises(errors.EngineDied):
        await asked
    fleet.prefills[0].steps.open()
    part, or_later = failed_in(await traces.only(fleet))
    assert (part, or_later[:2]) == ("prefill.hop", ("prefill.queue", "prefill.forward"))
    assert "kv.wait" in or_later


async def test_a_retried_request_shows_where_it_was(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """The failed attempt ends with its part, the other has all of them; the root has TTFT and retry, and no failure."""
    fleet = await launch(traces=traces, prefills=2, decodes=2)
    FAILPOINTS.arm(Point.DECODE_RECEIVED, "1*error(ENGINE_DIED)")
    answer = await fleet.ask(prompt(100), mode="read")
    assert answer.fallbacks == 1
    trace = await traces.only(fleet)
    first, second = trace.named(names.ATTEMPT)
    assert first.attributes[names.FAILED_IN] == "decode.admit"
    assert names.FAILED_IN not in {**second.attributes, **trace.root.attributes}
    assert names.FAILED_AFTER not in trace.root.attributes
    assert trace.parts()[names.RETRY] > 0
    below = [span.name.removeprefix("pdserve.") for span in trace.spans if span.parent_id == first.span_id]
    assert below == ["prefill.hop", "prefill.queue", "prefill.forward", "proxy.serialization", "decode.admit"]
    assert [span.parent_id for span in trace.spans if span.status.failed] == [trace.root.span_id, first.span_id]


async def test_a_cancelled_request_says_where_it_was(launch: Launch, prompt: Prompt, traces: Traces) -> None:
    """The client left while prefill computed: prefill, which was let go, has said nothing of it."""
    fleet = await launch(traces=traces)
    fleet.prefills[0].steps.shut()
    asked = asyncio.ensure_future(fleet.ask(prompt(100), mode="read"))
    await fleet.prefills[0].steps.reached()
    asked.cancel()
    trace = await traces.only(fleet)
    fleet.prefills[0].steps.open()
    assert trace.root.attributes[names.OUTCOME] == "cancelled"
    assert failed_in(trace)[0] == "prefill.hop"
