"""What each metric of pdserve is: kind, labels, meaning, buckets, and which service has it. Values only.

No label takes an id of a request or a transfer. `engine_id` is a label only where one process speaks of
several engines, and only of those that are there now.
"""

import enum
from dataclasses import dataclass
from typing import Final

from pdserve.runtime.telemetry import names


class Kind(enum.Enum):
    """As Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. Each is itself alone: they are keys where every token counts."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets, upper, without infinity."""


SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""1, 2, 5 of each power of ten: a quantile is off by at most a factor of 2.5 (3 above 20 s), wherever it lies.
From 1 ms, what a hop on one host or a token of a small model takes, to 60 s, a prompt that waits for a full pool.
The same for all, so that parts can be laid beside the time that they sum up to."""

_GEN_AI: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def _seconds(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, SECONDS)


BUILD_INFO: Final = _gauge(names.BUILD_INFO, "1; what runs here.", "service", "version")

# -- proxy ------------------------------------------------------------------------------------

DURATION: Final = _seconds(
    names.GEN_AI_DURATION_SECONDS,
    "From a request's first byte to the end of its answer or failure; error_type is empty where it got an answer.",
    *_GEN_AI,
    "error_type",
)
TTFT: Final = _seconds(
    names.GEN_AI_TTFT_SECONDS,
    "From a request's first byte to the first byte of its answer; of all that got one.",
    *_GEN_AI,
)
TPOT: Final = _seconds(
    names.GEN_AI_TPOT_SECONDS,
    "Mean seconds for each token after the first, of answers that ended well and have more than one.",
    *_GEN_AI,
)
TTFT_PART: Final = _seconds(
    names.TTFT_PART_SECONDS,
    "Parts of the time to first token; with part=unattributed they sum up to it. kv.wait is the RDMA wait,"
    " whatever the transport. A request that has no such part counts for none.",
    "part",
    "mode",
)
ITL: Final = _seconds(
    names.ITL_SECONDS,
    "From one piece of an answer to the next, as the proxy gets them; mostly pieces are single tokens.",
    "mode",
)
REQUESTS: Final = _counter(
    names.REQUESTS_TOTAL,
    "Requests that were taken and have ended: outcome finished, failed or cancelled; reason of the error, empty"
    " without one; mode of the hand-over, none without one.",
    "outcome",
    "reason",
    "mode",
    "model",
)
REFUSALS: Final = _counter(
    names.REFUSALS_TOTAL, "Requests that were refused before they were taken: invalid, no engine, full queue.", "reason"
)
ATTEMPTS: Final = _counter(
    names.ATTEMPTS_TOTAL, "Attempts that have ended, several for a request that was tried again.", "reason", "mode"
)
FALLBACKS: Final = _counter(names.FALLBACKS_TOTAL, "Times that requests left their path before the first token.")
CONTINUATIONS: Final = _counter(names.CONTINUATIONS_TOTAL, "Times that begun answers were taken up by other engines.")
RECOMPUTED_TOKENS: Final = _counter(
    names.RECOMPUTED_TOKENS_TOTAL, "Prompt tokens that decode computed itself although a hand-over was meant."
)
TOKENS: Final = _counter(
    names.TOKENS_TOTAL,
    "Tokens of requests that have ended: input, output, and cached, which are those of the input that a prefix"
    " cache had.",
    "kind",
)
KV_BYTES: Final = _counter(names.KV_BYTES_TOTAL, "Bytes handed over for answers that ended well.", "mode", "transport")
KV_OVERLAPPED_BYTES: Final = _counter(
    names.KV_OVERLAPPED_BYTES_TOTAL,
    "Bytes of these that were in place before prefill had ended.",
    "mode",
    "transport",
)
PROXY_QUEUED: Final = _gauge(names.PROXY_QUEUED, "Requests that wait for credits, or for an engine.")
PROXY_IN_FLIGHT: Final = _gauge(names.PROXY_IN_FLIGHT, "Requests that have engines.")
PROXY_ENGINES: Final = _gauge(
    names.PROXY_ENGINES, "Engines that have registered: state ready, draining, suspect or foreign.", "role", "state"
)
PROXY_CREDIT_TOKENS: Final = _gauge(
    names.PROXY_CREDIT_TOKENS,
    "KV tokens of an engine's pool: reserved by this proxy, used by others, available; together the pool.",
    "engine_id",
    "role",
    "state",
)
PROXY_ENGINE_REQUESTS: Final = _gauge(
    names.PROXY_ENGINE_REQUESTS,
    "Requests in an engine, running or waiting, as its last beat said.",
    "engine_id",
    "role",
    "state",
)
PROXY_BEAT_AGE: Final = _gauge(names.PROXY_BEAT_AGE_SECONDS, "Since an engine's last beat.", "engine_id", "role")
PROXY_SPANS: Final = _counter(
    names.PROXY_SPANS_TOTAL,
    "Spans of traces that were to be sent: exported (the collector has them), dropped (there was no room for them;"
    " whole traces) or failed (the collector was away, or refused them, or the process that sends them died). Absent"
    " where traces go nowhere.",
    "state",
)
PROXY_UNDRAWN: Final = _counter(
    names.PROXY_UNDRAWN_TOTAL, "Requests of which no trace could be drawn, a defect; the proxy's log has trace_failed."
)

PROXY: Final = (
    BUILD_INFO, DURATION, TTFT, TPOT, TTFT_PART, ITL, REQUESTS, REFUSALS, ATTEMPTS, FALLBACKS, CONTINUATIONS,
    RECOMPUTED_TOKENS, TOKENS, KV_BYTES, KV_OVERLAPPED_BYTES, PROXY_QUEUED, PROXY_IN_FLIGHT, PROXY_ENGINES,
    PROXY_CREDIT_TOKENS, PROXY_ENGINE_REQUESTS, PROXY_BEAT_AGE, PROXY_SPANS, PROXY_UNDRAWN,
)  # fmt: skip

# -- kvd --------------------------------------------------------------------------------------

KVD_BLOCKS: Final = _gauge(
    names.KVD_BLOCKS,
    "KV blocks of a rank: free, leased, in_flight or quarantined; together all it has.",
    "engine_id",
    "rank",
    "state",
)
KVD_REGION_BYTES: Final = _gauge(names.KVD_REGION_BYTES, "Mapped KV memory of a rank.", "engine_id", "rank", "kind")
KVD_ENGINES: Final = _gauge(
    names.KVD_ENGINES,
    "Engines: attached, away (no participant has a stream), or ended (its memory is still in use).",
    "state",
)
KVD_PARTICIPANTS: Final = _gauge(
    names.KVD_PARTICIPANTS, "Processes of engines, by kind: attached, or away.", "kind", "state"
)
KVD_TRANSFERS: Final = _gauge(names.KVD_TRANSFERS, "Open transfers.", "mode")
KVD_ENDS: Final = _gauge(names.KVD_ENDS, "Ends of open transfers, by their state.", "end", "state")
KVD_ENDED: Final = _counter(
    names.KVD_ENDED_TOTAL,
    "Ends of transfers that are over. Outcome released, landed, failed, cancelled or expired; reason of the"
    " error, empty where it went well; mode none where no transfer was made for it; transport empty where nothing"
    " was copied.",
    "end",
    "outcome",
    "reason",
    "mode",
    "transport",
)
KVD_TRANSFER_SECONDS: Final = _seconds(
    names.KVD_TRANSFER_SECONDS,
    "From decode's reserving of its blocks to their landing; in WRITE that holds the wait for prefill.",
    "mode",
    "transport",
)
KVD_COPIES: Final = _counter(
    names.KVD_COPIES_TOTAL,
    "Copies that have ended: done, cancelled or failed. lanes: what the transport used, in its own words, empty where"
    " it has no choice or nothing was copied.",
    "mode",
    "transport",
    "lanes",
    "result",
)
KVD_COPIED_BYTES: Final = _counter(
    names.KVD_COPIED_BYTES_TOTAL, "Bytes copied, also for hand-overs that failed.", "mode", "transport", "lanes"
)
KVD_COPY_SECONDS: Final = _counter(
    names.KVD_COPY_SECONDS_TOTAL,
    "Spent copying, summed over copies that run side by side: bytes over seconds is the rate of one copy.",
    "mode",
    "transport",
    "lanes",
)
KVD_COPIES_RUNNING: Final = _gauge(names.KVD_COPIES_RUNNING, "Copies under way.")
KVD_FENCES: Final = _counter(names.KVD_FENCES_TOTAL, "Fences that are over.")
KVD_FENCES_WAITED: Final = _counter(names.KVD_FENCES_WAITED_TOTAL, "Of these, the ones that found a copy under way.")
KVD_FENCE_SECONDS: Final = _counter(names.KVD_FENCE_SECONDS_TOTAL, "Spent in fences: blocks were kept that long.")
KVD_FENCE_LONGEST: Final = _gauge(names.KVD_FENCE_LONGEST_SECONDS, "Longest fence so far.")
KVD_FENCES_TORN_DOWN: Final = _counter(
    names.KVD_FENCES_TORN_DOWN_TOTAL, "Fences past their deadline: their sessions were torn down. An incident."
)
KVD_EXPIRIES: Final = _counter(
    names.KVD_EXPIRIES_TOTAL, "Deadlines of transfers that ran out; deadline=lease is an incident.", "deadline"
)
KVD_TIES: Final = _counter(names.KVD_TIES_BROKEN_TOTAL, "Offers given up because two full pools waited for each other.")
KVD_NOTICES: Final = _counter(
    names.KVD_NOTICES_TOTAL,
    "Workers' notices: taken, ignored (of nobody that is here) or malformed. A lost one costs overlap only.",
    "result",
)
KVD_DEFECTS: Final = _counter(names.KVD_DEFECTS_TOTAL, "Errors that only a defect of kvd explains. An incident.")
KVD_COPIER: Final = _gauge(
    names.KVD_COPIER_INFO, "1; how host memory is copied: compiled, or python, which is slower.", "copier"
)
KVD_DRAINING: Final = _gauge(names.KVD_DRAINING, "1 while new transfers are refused.")
KVD_PEERS: Final = _gauge(
    names.KVD_PEERS, "Other nodes' daemons by the link's state: connecting, open or away (within the grace).", "state"
)
KVD_PEERS_LOST: Final = _counter(
    names.KVD_PEERS_LOST_TOTAL, "Links to other nodes' daemons that were lost, with all that was open on them."
)
KVD_PEER_OPERATIONS: Final = _gauge(
    names.KVD_PEER_OPERATIONS, "Copies that other nodes' daemons carry out for transfers of this node's engines."
)

KVD: Final = (
    BUILD_INFO, KVD_BLOCKS, KVD_REGION_BYTES, KVD_ENGINES, KVD_PARTICIPANTS, KVD_TRANSFERS, KVD_ENDS, KVD_ENDED,
    KVD_TRANSFER_SECONDS, KVD_COPIES, KVD_COPIED_BYTES, KVD_COPY_SECONDS, KVD_COPIES_RUNNING, KVD_FENCES,
    KVD_FENCES_WAITED, KVD_FENCE_SECONDS, KVD_FENCE_LONGEST, KVD_FENCES_TORN_DOWN, KVD_EXPIRIES, KVD_TIES,
    KVD_NOTICES, KVD_DEFECTS, KVD_COPIER, KVD_DRAINING, KVD_PEERS,
    KVD_PEERS_LOST, KVD_PEER_OPERATIONS,
)  # fmt: skip

# -- prefill and decode services --------------------------------------------------------------

ENGINE_INFO: Final = _gauge(names.ENGINE_INFO, "1; the engine that runs here.", "role", "engine_id", "model")
ENGINE_CALLS: Final = _gauge(names.ENGINE_CALLS, "Open calls of the proxy.", "role")
ENGINE_REQUESTS: Final = _gauge(names.ENGINE_REQUESTS, "Requests in the engine: running or waiting.", "role", "state")
ENGINE_KV_TOKENS: Final = _gauge(
    names.ENGINE_KV_TOKENS, "KV tokens of the engine's pool: free or used; together the pool.", "role", "state"
)
ENGINE_STEPS: Final = _counter(names.ENGINE_STEPS_TOTAL, "Steps of the engine.", "role")
ENGINE_DRAINING: Final = _gauge(names.ENGINE_DRAINING, "1 while new calls are refused.", "role")
ENGINE_KVD_ATTACHED: Final = _gauge(
    names.ENGINE_KVD_ATTACHED, "1 while the node's kvd is there; absent without one.", "role"
)
ENGINE_HANDOVERS_OPEN: Final = _gauge(
    names.ENGINE_HANDOVERS_OPEN, "Ends of hand-overs that calls wait for; absent without kvd.", "role"
)
ENGINE_HANDOVERS_ENDED: Final = _counter(
    names.ENGINE_HANDOVERS_TOTAL,
    "Ends of hand-overs as calls here heard of them. Outcome and reason as kvd's; failed with KVD_UNAVAILABLE where"
    " kvd was lost under them; left where the call ended first.",
    "role",
    "end",
    "outcome",
    "reason",
)
ENGINE_RECOMPUTING: Final = _gauge(
    names.ENGINE_RECOMPUTING,
    "Prompts that decode computes now in place of hand-overs that failed under the same call.",
    "role",
)
ENGINE_RECOMPUTES: Final = _counter(
    names.ENGINE_RECOMPUTES_TOTAL,
    "Answers whose prompts decode has computed so. Those that the proxy asks for anew are not among them:"
    " pdserve_recomputed_tokens_total has all.",
    "role",
)
ENGINE_RECOMPUTES_REFUSED: Final = _counter(
    names.ENGINE_RECOMPUTES_REFUSED_TOTAL,
    "Prompts that it did not compute so, because as many as may be were being computed.",
    "role",
)
ENGINE_BEATS_UNANSWERED: Final = _gauge(
    names.ENGINE_BEATS_UNANSWERED, "Beats since the proxy's last answer; 1 is usual; absent without a proxy.", "role"
)

ENGINE: Final = (
    BUILD_INFO, ENGINE_INFO, ENGINE_CALLS, ENGINE_REQUESTS, ENGINE_KV_TOKENS, ENGINE_STEPS, ENGINE_DRAINING,
    ENGINE_KVD_ATTACHED, ENGINE_HANDOVERS_OPEN, ENGINE_HANDOVERS_ENDED, ENGINE_BEATS_UNANSWERED,
)  # fmt: skip
"""Of both services."""
DECODE: Final = (*ENGINE, ENGINE_RECOMPUTING, ENGINE_RECOMPUTES, ENGINE_RECOMPUTES_REFUSED)
"""Of decode services."""
