"""The numbers of a request, as attributes of its root span. Pure.

Parts are disjoint and sum to TTFT; raw intervals are from stamp to stamp, may overlap, and are what the
formulas for READ and WRITE are made of.
"""

from collections.abc import Mapping

from pdserve.proxy import parts, unfinished
from pdserve.proxy.ended import Ended, Tried
from pdserve.proxy.parts import Point
from pdserve.proxy.types import Mode, TransferFacts
from pdserve.proxy.unfinished import Unfinished
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Value

_RAW = (
    ("prefill.queue", Point.PREFILL_RECEIVED, Point.PREFILL_SCHEDULED),
    ("prefill.forward", Point.PREFILL_SCHEDULED, Point.PREFILL_FORWARD_END),
    ("proxy.serialization", Point.PREFILL_FORWARD_END, Point.DECODE_RECEIVED),
    ("decode.admit", Point.DECODE_RECEIVED, Point.DECODE_BLOCKS_RESERVED),
    ("kv.wait", Point.DECODE_BLOCKS_RESERVED, Point.KV_LANDED),
    ("decode.queue", Point.KV_LANDED, Point.DECODE_SCHEDULED),
    ("first_token", Point.DECODE_SCHEDULED, Point.FIRST_TOKEN_SAMPLED),
    ("detokenize", Point.FIRST_TOKEN_SAMPLED, Point.DETOKENIZED),
    ("encode", Point.DETOKENIZED, Point.TOKEN_RECEIVED),
    ("egress", Point.TOKEN_RECEIVED, Point.FIRST_BYTE_WRITTEN),
)


def giver(ended: Ended) -> Tried | None:
    """The attempt that gave the first token; None where the client got none."""
    return next((tried for tried in ended.attempts if tried.course.first_byte_ns), None)


def of_request(ended: Ended) -> dict[str, Value]:
    """All of the root's attributes."""
    finished, last = ended.finished, ended.attempts[-1] if ended.attempts else None
    mode = (last.mode if last else None) if finished is None else finished.mode
    said: dict[str, Value] = {
        names.REQUEST_ID: ended.request_id,
        names.MODE: mode.value if mode else "none",
        names.OUTCOME: ended.outcome.value,
        names.FALLBACKS: ended.fallbacks,
        names.CONTINUATIONS: ended.continuations,
        names.RECOMPUTED_TOKENS: finished.recomputed_tokens if finished else 0,
        names.E2E: (ended.ended_ns - ended.points[Point.RECEIVED]) / 1e9,
    }
    if ended.reason:
        said |= {names.ERROR_TYPE: ended.reason, names.ERROR_MESSAGE: ended.error}
    if finished is not None and finished.transfer is not None:
        said |= of_transfer(finished.transfer)
    return said | _gen_ai(ended) | _ttft(ended) | _failure(ended)


def of_failure(way: Unfinished) -> dict[str, Value]:
    """Where it failed, and how sure that is."""
    said: dict[str, Value] = {names.FAILED_IN: way.last.part}
    return said | of_doubt(way)


def of_doubt(way: Unfinished) -> dict[str, Value]:
    """What is not known of a failure; nothing where all is."""
    said: dict[str, Value] = {}
    if way.or_later:
        said[names.FAILED_OR_LATER] = way.or_later
    if way.unstamped:
        said[names.UNSTAMPED] = way.unstamped
    return said


def of_transfer(facts: TransferFacts) -> dict[str, Value]:
    """What a hand-over moved."""
    said: dict[str, Value] = {
        names.KV_BYTES: facts.kv_bytes,
        names.KV_BLOCKS: facts.blocks,
        names.TRANSPORT: facts.transport,
    }
    return said | {names.LANES: facts.lanes} if facts.lanes else said


def of_copies(facts: TransferFacts, kv_bytes: int) -> dict[str, Value]:
    """For kvd's own spans: the bytes of this one, and how all of the hand-over was copied. Of one that failed kvd
    says no blocks, layers and ranks, and no transport before a copy has ended."""
    said: dict[str, Value] = {
        names.KV_BYTES: kv_bytes,
        names.KV_COPY: facts.copy_ns / 1e9,
        names.KV_OVERLAPPED: facts.overlapped_bytes,
    }
    known: dict[str, Value] = {
        names.KV_BLOCKS: facts.blocks,
        names.KV_LAYERS: facts.layers,
        names.KV_RANKS: facts.ranks,
        names.TRANSPORT: facts.transport,
        names.LANES: facts.lanes,
    }
    said |= {name: value for name, value in known.items() if value}
    if facts.copy_ns:
        said[names.KV_RATE] = facts.kv_bytes / (facts.copy_ns / 1e9)
    return said


def _gen_ai(ended: Ended) -> dict[str, Value]:
    asked = ended.sampling
    said: dict[str, Value | None] = {
        names.GEN_AI_OPERATION: names.CHAT if ended.chat else names.COMPLETION,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_MODEL: ended.model,
        names.GEN_AI_MAX_TOKENS: asked.max_tokens,
        names.GEN_AI_TEMPERATURE: asked.temperature,
        names.GEN_AI_TOP_P: asked.top_p,
        names.GEN_AI_TOP_K: asked.top_k,
        names.GEN_AI_SEED: asked.seed,
        names.GEN_AI_PRESENCE_PENALTY: asked.presence_penalty or None,
        names.GEN_AI_FREQUENCY_PENALTY: asked.frequency_penalty or None,
        names.GEN_AI_CHOICES: asked.n if asked.n > 1 else None,
        names.GEN_AI_FINISH_REASONS: ended.finish_reasons or None,
        names.GEN_AI_INPUT_TOKENS: ended.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: ended.completion_tokens,
        names.GEN_AI_CACHED_TOKENS: ended.finished.usage.cached_tokens if ended.finished else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _ttft(ended: Ended) -> dict[str, Value]:
    first = giver(ended)
    if first is None or Point.FIRST_BYTE_WRITTEN not in ended.points:
        return {}
    path = parts.chain(handed_over=bool(first.prefill_engine_id), retried=Point.REDISPATCHED in ended.points)
    timings = parts.split(ended.points, path, ended.ended_ns, first.mode)
    said: dict[str, Value] = {names.TTFT: timings.ttft, names.UNATTRIBUTED: timings.unattributed}
    said |= {names.ttft_part(part): seconds for part, seconds in timings.parts.items()}
    if "kv.wait" in timings.parts:
        said[names.RDMA_WAIT] = timings.parts["kv.wait"]
    if "proxy.serialization" in timings.parts:
        said[names.PROXY_SERIALIZATION] = timings.parts["proxy.serialization"]
    raw = raw_intervals(ended.points, first)
    return said | {names.raw(name): seconds for name, seconds in raw.items()} | formula(raw, first.mode)


def _failure(ended: Ended) -> dict[str, Value]:
    """The parts up to the failure; with what is nobody's they are all the time until then."""
    way = unfinished.of_request(ended)
    if way is None:
        return {}
    said: dict[str, Value] = {
        names.FAILED_AFTER: (way.last.end_ns - ended.points[Point.RECEIVED]) / 1e9,
        names.FAILED_UNATTRIBUTED: way.unattributed,
    }
    return said | {names.failed_after_part(part): seconds for part, seconds in way.parts.items()} | of_failure(way)


def raw_intervals(points: Mapping[int, int], first: Tried) -> dict[str, float]:
    """Seconds by names.RAW; what lacks a stamp is left out."""
    course = first.course
    found = {name: (points[b] - points[a]) / 1e9 for name, a, b in _RAW if a in points and b in points}
    if not first.prefill_engine_id:
        return found
    if Point.PREFILL_RECEIVED in points:
        found["prefill.hop"] = (points[Point.PREFILL_RECEIVED] - course.dispatched_ns) / 1e9
        if "egress" in found:
            found["network"] = found["prefill.hop"] + found["egress"]
    if Point.DECODE_RECEIVED in points:
        found["held_back"] = (points[Point.DECODE_RECEIVED] - course.dispatched_ns) / 1e9
    landed = course.facts.last_byte_ns if course.facts else 0
    if first.mode is Mode.WRITE and landed and Point.PREFILL_FORWARD_END in points:
        found["write"] = (landed - points[Point.PREFILL_FORWARD_END]) / 1e9
    return found


def formula(raw: Mapping[str, float], mode: Mode | None) -> dict[str, Value]:
    """What the formula for this mode sums up to; nothing where a term of it was not measured."""
    try:
        tail = raw["first_token"] + raw["detokenize"] + raw["encode"] + raw["network"]
        prefill = raw["prefill.queue"] + raw["prefill.forward"]
        queue = raw["decode.admit"] + raw["decode.queue"]
        if mode is Mode.READ:
            return {names.FORMULA_READ: prefill + raw["proxy.serialization"] + raw["kv.wait"] + queue + tail}
        if mode is Mode.WRITE:
            return {names.FORMULA_WRITE: max(prefill + raw["write"], queue) + tail}
    except KeyError:
        pass  # a service did not stamp it
    return {}
