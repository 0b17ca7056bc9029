"""What a fleet tells Prometheus: every metric has samples that say what the test did, and no other is there."""

import asyncio
import contextlib

import pytest

from pdserve.costmodel import CostModel
from pdserve.decode.session import DecodeConfig
from pdserve.kvd.limits import Limits
from pdserve.kvd.metrics import metrics_of
from pdserve.kvd.testing import Fault
from pdserve.rpc import errors
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry.catalogue import Metric
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.sim.hosted import Service
from tests.unit.telemetry.exposed import Exposed, kind_of, parse

FAST = 1e12
BOTH = pytest.mark.parametrize("mode", ["read", "write"])
BLOCK, LAYERS, BLOCK_BYTES, BLOCKS = 16, 4, 128, 512
"""Of the simulated engine: tokens, layers, bytes of a block in a layer, blocks of a pool."""
SLOW = CostModel(0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""A step with a prompt lasts longer than the word of a failed copy takes to the service."""
TOKENS = 8
READ_PROMPT, WRITE_PROMPT, FAILED_PROMPT, RETRIED_PROMPT = 100, 70, 50, 33


def kv_bytes(prompt: int) -> int:
    """What a hand-over of so many tokens moves."""
    return -(-prompt // BLOCK) * LAYERS * BLOCK_BYTES


async def proxy(fleet: Fleet) -> Exposed:
    """As Prometheus would get it."""
    async with fleet.http.get("/metrics") as response:
        assert response.status == 200
        return parse(await response.read())


def kvd(fleet: Fleet) -> Exposed:
    """What its endpoint would answer."""
    return parse(metrics_of(fleet.kvd.node).expose())


def service(hosted: Service) -> Exposed:
    """What its endpoint would answer."""
    return parse(hosted.parts.metrics.expose())


def declared(shown: Exposed, metrics: tuple[Metric, ...], *but: Metric) -> None:
    """All of these, and nothing else; each with samples but those that did not happen."""
    assert shown.kinds == dict(map(kind_of, metrics))
    assert {metric.name for metric in metrics} - shown.names == {metric.name for metric in but}


@pytest.fixture
async def busy(launch: Launch, prompt: Prompt) -> Fleet:
    """A READ, a WRITE, a hand-over that fails, one that is tried again on the other pair, and a refusal."""
    fleet = await launch(bandwidth=FAST, prefills=2, prefix_cache=False)
    await fleet.ask(prompt(READ_PROMPT), mode="read", max_tokens=TOKENS)
    await fleet.ask(prompt(WRITE_PROMPT), mode="write", max_tokens=TOKENS)
    fleet.faults.script += [Fault.FAIL]
    with pytest.raises(errors.TransferFailed):
        await fleet.ask(prompt(FAILED_PROMPT), mode="read", max_tokens=TOKENS, on_failure="fail")
    fleet.faults.script += [Fault.FAIL]
    again = await fleet.ask(prompt(RETRIED_PROMPT), mode="read", max_tokens=TOKENS, on_failure="recompute")
    assert again.fallbacks == 1
    with pytest.raises(errors.UnknownModel):
        await fleet.ask(prompt(READ_PROMPT), model="other")
    await fleet.settled(5)
    return fleet


async def test_the_proxy_counts_requests(busy: Fleet) -> None:
    """Each request once, by how it ended; attempts, fallbacks, tokens and refusals beside."""
    shown = await proxy(busy)
    declared(shown, c.PROXY, c.PROXY_SPANS)  # its traces go nowhere
    assert shown.by(c.REQUESTS, "outcome", "reason", "mode", "model") == {
        ("finished", "", "read", "sim"): 2,
        ("finished", "", "write", "sim"): 1,
        ("failed", "TRANSFER_FAILED", "read", "sim"): 1,
    }
    assert shown.by(c.ATTEMPTS, "reason", "mode") == {
        ("", "read"): 2,
        ("", "write"): 1,
        ("TRANSFER_FAILED", "read"): 2,
    }
    assert shown.by(c.REFUSALS, "reason") == {("UNKNOWN_MODEL",): 1}
    assert (shown.of(c.FALLBACKS), shown.of(c.CONTINUATIONS), shown.of(c.RECOMPUTED_TOKENS)) == (1, 0, 0)
    asked = READ_PROMPT + WRITE_PROMPT + FAILED_PROMPT + RETRIED_PROMPT
    assert shown.by(c.TOKENS, "kind") == {("input",): asked, ("output",): 3 * TOKENS}
    assert (shown.of(c.PROXY_QUEUED), shown.of(c.PROXY_IN_FLIGHT)) == (0, 0)


async def test_the_proxy_measures_what_clients_see(busy: Fleet) -> None:
    """TTFT of those that got a token, duration of all, a gap between every two tokens; the parts sum to TTFT."""
    shown = await proxy(busy)
    assert shown.of(c.DURATION, "_count") == 4
    assert shown.of(c.DURATION, "_count", error_type="TRANSFER_FAILED") == 1
    assert shown.of(c.TTFT, "_count", gen_ai_request_model="sim", gen_ai_provider_name="pdserve") == 3
    assert shown.of(c.TPOT, "_count", gen_ai_operation_name="text_completion") == 3
    assert {mode: shown.of(c.ITL, "_count", mode=mode) for mode in ("read", "write")} == {
        "read": 2 * (TOKENS - 1),
        "write": TOKENS - 1,
    }
    assert shown.of(c.TTFT_PART, "_sum") == pytest.approx(shown.of(c.TTFT, "_sum"), abs=1e-8)
    parts = ("kv.wait", "proxy.serialization", "prefill.forward", "unattributed")
    assert [shown.of(c.TTFT_PART, "_count", part=part, mode="read") for part in parts] == [2] * 4
    assert [shown.of(c.TTFT_PART, "_count", part=part, mode="write") for part in parts] == [1] * 4
    assert shown.of(c.TTFT_PART, "_count", part="retry") == 1
    assert 0 < shown.of(c.TTFT, "_sum") <= shown.of(c.DURATION, "_sum")


async def test_bytes_are_counted_alike_at_both_ends(busy: Fleet) -> None:
    """Blocks x layers x bytes of a block, by mode and transport, at the proxy and at kvd."""
    read, write = kv_bytes(READ_PROMPT) + kv_bytes(RETRIED_PROMPT), kv_bytes(WRITE_PROMPT)
    want = {("read", "sim"): read, ("write", "sim"): write}
    assert (await proxy(busy)).by(c.KV_BYTES, "mode", "transport") == want
    shown = kvd(busy)
    assert shown.by(c.KVD_COPIED_BYTES, "mode", "transport") == want
    assert shown.by(c.KVD_COPY_SECONDS, "mode", "transport").keys() == want.keys()
    assert shown.of(c.KVD_COPIES, mode="read", result="done") == 2
    assert shown.of(c.KVD_COPIES, mode="read", result="failed") == 2
    assert shown.of(c.KVD_COPIES, mode="write", result="done") == shown.of(c.KVD_COPIES, mode="write") >= 1


async def test_kvd_counts_ends(busy: Fleet) -> None:
    """Each end of each transfer once, by outcome, reason, mode; nothing is open, every block is free."""
    shown = kvd(busy)
    declared(shown, c.KVD)
    failed = {(end, "failed", "TRANSFER_FAILED", "read"): 2 for end in ("producer", "consumer")}
    good = {
        ("consumer", "landed", "", "read"): 2,
        ("producer", "released", "", "read"): 2,
        ("consumer", "landed", "", "write"): 1,
        ("producer", "released", "", "write"): 1,
    }
    assert shown.by(c.KVD_ENDED, "end", "outcome", "reason", "mode") == failed | good
    assert shown.of(c.KVD_TRANSFER_SECONDS, "_count", mode="read", transport="sim") == 2
    assert shown.of(c.KVD_TRANSFER_SECONDS, "_count", mode="write", transport="sim") == 1
    assert shown.by(c.KVD_BLOCKS, "state") == {("free",): 3 * BLOCKS}
    assert (shown.of(c.KVD_TRANSFERS), shown.of(c.KVD_ENDS), shown.of(c.KVD_COPIES_RUNNING)) == (0, 0, 0)
    assert (shown.of(c.KVD_FENCES), shown.of(c.KVD_FENCES_WAITED), shown.of(c.KVD_FENCES_TORN_DOWN)) == (4, 0, 0)
    assert shown.by(c.KVD_ENGINES, "state") == {("attached",): 3}
    assert shown.by(c.KVD_PARTICIPANTS, "kind", "state") == {
        ("host", "attached"): 3,
        ("scheduler", "attached"): 3,
        ("worker", "attached"): 3,
    }
    assert shown.of(c.KVD_NOTICES, result="taken") > 0
    assert shown.of(c.KVD_NOTICES, result="malformed") == shown.of(c.KVD_DEFECTS) == shown.of(c.KVD_EXPIRIES) == 0


async def test_the_services_count_hand_overs(busy: Fleet) -> None:
    """Every hand-over once at each end, over all engines; an end that nobody waited for any more says so."""
    produced = [service(hosted) for hosted in busy.prefills]
    consumed = service(busy.decodes[0])
    for shown in produced:
        declared(shown, c.ENGINE, *(() if shown.of(c.ENGINE_HANDOVERS_ENDED) else (c.ENGINE_HANDOVERS_ENDED,)))
    declared(consumed, c.DECODE)
    assert sum(shown.of(c.ENGINE_HANDOVERS_ENDED, end="producer", outcome="released") for shown in produced) == 3
    assert sum(shown.of(c.ENGINE_HANDOVERS_ENDED, end="producer") for shown in produced) == 5
    assert consumed.of(c.ENGINE_HANDOVERS_ENDED, role="decode", end="consumer", outcome="landed") == 3
    assert consumed.of(c.ENGINE_HANDOVERS_ENDED) == 5
    assert consumed.by(c.ENGINE_KV_TOKENS, "state") == {("free",): BLOCKS * BLOCK}
    assert consumed.of(c.ENGINE_STEPS) >= TOKENS
    assert [consumed.of(metric) for metric in (c.ENGINE_KVD_ATTACHED, c.ENGINE_CALLS, c.ENGINE_DRAINING)] == [1, 0, 0]
    assert consumed.each(c.ENGINE_INFO, engine_id=busy.decodes[0].engine_id, model="sim", role="decode") == [1]


async def test_no_id_of_a_request_is_a_label(busy: Fleet) -> None:
    """However many requests there are, they make no series of their own: only engines, of those that are there."""
    engines = {hosted.engine_id for hosted in (*busy.prefills, *busy.decodes)}
    before = {**(await proxy(busy)).values, **kvd(busy).values}
    for number in range(3):
        await busy.ask(tuple(range(number, number + 40)), mode="read", max_tokens=TOKENS)
    await busy.settled(5)
    after = {**(await proxy(busy)).values, **kvd(busy).values}
    assert after.keys() == before.keys()
    labels = {(label, value) for _, has in after for label, value in has}
    assert {value for label, value in labels if label == "engine_id"} == engines
    assert not {value for label, value in labels if len(value) >= 32} - engines


@BOTH
async def test_what_is_held_is_shown_while_it_is(launch: Launch, prompt: Prompt, mode: str) -> None:
    """A copy that stands still: its blocks at kvd, a transfer, credits, a call and a hand-over at each service."""
    fleet = await launch(bandwidth=FAST)
    fleet.link.shut()
    asking = asyncio.create_task(fleet.ask(prompt(READ_PROMPT), mode=mode, max_tokens=TOKENS))
    await fleet.link.reached()
    shown = kvd(fleet)
    blocks = -(-READ_PROMPT // BLOCK)
    decode = fleet.decodes[0]
    assert shown.of(c.KVD_BLOCKS, engine_id=decode.engine_id, rank="0", state="in_flight") == blocks
    assert shown.of(c.KVD_BLOCKS, engine_id=decode.engine_id) == BLOCKS
    assert shown.by(c.KVD_TRANSFERS, "mode") == {(mode,): 1}
    assert shown.of(c.KVD_ENDS, end="consumer", state="filling") == 1
    assert shown.of(c.KVD_COPIES_RUNNING) >= 1
    front = await proxy(fleet)
    assert (front.of(c.PROXY_IN_FLIGHT), front.of(c.PROXY_QUEUED)) == (1, 0)
    assert front.by(c.PROXY_ENGINES, "role", "state") == {("prefill", "ready"): 1, ("decode", "ready"): 1}
    credits = {state: front.of(c.PROXY_CREDIT_TOKENS, engine_id=decode.engine_id, state=state)
               for state in ("reserved", "others", "available")}  # fmt: skip
    assert credits["reserved"] >= READ_PROMPT
    assert sum(credits.values()) == BLOCKS * BLOCK
    for hosted in (fleet.prefills[0], decode):
        told = service(hosted)
        assert (told.of(c.ENGINE_CALLS), told.of(c.ENGINE_HANDOVERS_OPEN)) == (1, 1)
    fleet.link.open()
    await asking


async def test_a_deadline_and_a_torn_down_fence_are_shown(launch: Launch, prompt: Prompt) -> None:
    """A copy that stalls past its transfer's deadline and its fence's: an expiry, a torn down fence, EXPIRED ends."""
    limits = Limits(lease=60, accept=60, transfer=1.0, park=60, fence=0.2, tie=60)
    fleet = await launch(bandwidth=FAST, limits=limits)
    fleet.may_expire = True
    fleet.faults.script += [Fault.STALL]
    with pytest.raises(errors.TransferExpired):
        await fleet.ask(prompt(READ_PROMPT), mode="read", on_failure="fail")
    await fleet.settled(5)
    shown = kvd(fleet)
    assert shown.by(c.KVD_EXPIRIES, "deadline") == {("transfer",): 1}
    assert shown.of(c.KVD_ENDED, outcome="expired", reason="TRANSFER_EXPIRED", mode="read") >= 1
    assert shown.of(c.KVD_FENCES_TORN_DOWN) == 1
    assert shown.of(c.KVD_FENCE_LONGEST) >= 0.2
    assert shown.of(c.KVD_FENCE_SECONDS) >= shown.of(c.KVD_FENCE_LONGEST)


async def test_an_engine_that_is_gone_has_no_series(launch: Launch, prompt: Prompt) -> None:
    """Its gauges go with it, at kvd and at the proxy; what was counted stays."""
    fleet = await launch(prefills=2)
    await fleet.ask(prompt(READ_PROMPT), mode="read")
    doomed = fleet.prefills[0]
    await fleet.kill(doomed)
    await fleet.until(lambda: fleet.kvd.node.registry.get(doomed.engine_id) is None)
    await fleet.until(lambda: fleet.proxy.registry.get(doomed.engine_id) is None)
    for shown in (kvd(fleet), await proxy(fleet)):
        assert not [series for series in shown.values if ("engine_id", doomed.engine_id) in series[1]]
    assert kvd(fleet).by(c.KVD_ENGINES, "state") == {("attached",): 2}
    assert (await proxy(fleet)).of(c.REQUESTS) == 1


@BOTH
async def test_recomputing_is_counted_where_it_happens(launch: Launch, prompt: Prompt, mode: str) -> None:
    """One of two answers' copies fails and decode computes its prompt: one recompute, its tokens at the proxy."""
    fleet = await launch(bandwidth=FAST, prefix_cache=False)
    fleet.faults.script += [None, Fault.FAIL]
    await fleet.ask(prompt(READ_PROMPT), mode=mode, on_failure="recompute", n=2)
    assert (await proxy(fleet)).of(c.RECOMPUTED_TOKENS) == READ_PROMPT
    told = service(fleet.decodes[0])
    assert (told.of(c.ENGINE_RECOMPUTES), told.of(c.ENGINE_RECOMPUTES_REFUSED)) == (1, 0)
    assert told.of(c.ENGINE_RECOMPUTING) == 0


async def test_a_refused_recompute_is_counted(launch: Launch, prompt: Prompt) -> None:
    """A service that may compute no prompt counts the one that it refused, and computes none."""
    fleet = await launch(bandwidth=FAST, decodes=0, prefix_cache=False)
    decode = await fleet.host("decode", config=DecodeConfig(recomputing=0), cost=SLOW)
    fleet.faults.script += [None, Fault.FAIL]
    decode.steps.shut()  # the service hears of the failure before the engine can compute the prompt
    asking = asyncio.create_task(fleet.ask(prompt(READ_PROMPT), mode="read", on_failure="recompute", n=2))
    await fleet.until(lambda: service(decode).of(c.ENGINE_RECOMPUTES_REFUSED) == 1)
    decode.steps.open()
    with contextlib.suppress(errors.TransferFailed):  # it is tried again unless the other answer has begun
        await asking
    told = service(decode)
    assert (told.of(c.ENGINE_RECOMPUTES), told.of(c.ENGINE_RECOMPUTES_REFUSED)) == (0, 1)


async def test_a_continued_answer_counts_its_gap(launch: Launch, prompt: Prompt) -> None:
    """An answer that is taken up by another engine has one request, two attempts, and every gap between its tokens:
    also the one across the break, which the client felt."""
    fleet = await launch()
    doomed = fleet.decodes[0]
    doomed.steps.shut()
    stream = fleet.stream(prompt(READ_PROMPT), mode="read", max_tokens=TOKENS)
    reading = asyncio.ensure_future(anext(stream))
    await doomed.steps.pass_one()
    await reading
    await doomed.steps.reached()
    await fleet.host("decode")
    await fleet.kill(doomed)
    assert len((await stream.completion()).token_ids) == TOKENS
    shown = await proxy(fleet)
    assert (shown.of(c.CONTINUATIONS), shown.of(c.REQUESTS), shown.of(c.ATTEMPTS)) == (1, 1, 2)
    assert shown.by(c.TOKENS, "kind")["output",] == TOKENS
    assert shown.of(c.ITL, "_count") == TOKENS - 1
