"""Every name that telemetry speaks: services, spans, attributes and metrics. Units stand beside them.

Names hold no ids: what is asked about is counted by name.
"""

from typing import Final

# -- services: `service.name` of a resource -------------------------------------------------

PROXY: Final = "pdserve-proxy"
PREFILL: Final = "pdserve-prefill"
DECODE: Final = "pdserve-decode"
KVD: Final = "pdserve-kvd"

SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE: Final = "service.instance.id"
"""Of an engine: its engine_id."""
SERVICE_VERSION: Final = "service.version"

# -- spans ----------------------------------------------------------------------------------

REQUEST: Final = "pdserve.request"
ATTEMPT: Final = "pdserve.attempt"
STREAM: Final = "pdserve.decode.stream"
KVD_PUSH: Final = "pdserve.kvd.push"
KVD_RESOLVE: Final = "pdserve.kvd.resolve"
KVD_COPY: Final = "pdserve.kvd.copy"
KVD_NOTIFY: Final = "pdserve.kvd.notify"

PARTS: Final = {
    "tokenize": PROXY,
    "admit": PROXY,
    "route": PROXY,
    "prefill.hop": PROXY,
    "prefill.queue": PREFILL,
    "prefill.forward": PREFILL,
    "proxy.serialization": PROXY,
    "decode.hop": PROXY,
    "decode.admit": DECODE,
    "kv.wait": DECODE,
    "decode.queue": DECODE,
    "decode.first_step": DECODE,
    "detokenize": DECODE,
    "encode": PROXY,
    "egress": PROXY,
}
"""The parts of TTFT that are spans, `pdserve.<part>`, each with the service that it is a span of."""
RETRY: Final = "retry"
"""The part that is no span: what failed attempts took is drawn as those attempts."""


def part_span(part: str) -> str:
    """The span of a part."""
    return f"pdserve.{part}"


SPANS: Final = frozenset(
    {REQUEST, ATTEMPT, STREAM, KVD_PUSH, KVD_RESOLVE, KVD_COPY, KVD_NOTIFY, *map(part_span, PARTS)}
)
"""All that there are."""

FIRST_TOKEN_EVENT: Final = "first_token"
"""The client has its first token."""

# -- attributes of a request ----------------------------------------------------------------

REQUEST_ID: Final = "pdserve.request_id"
MODE: Final = "pdserve.mode"
"""read, write, or none."""
TRANSPORT: Final = "pdserve.transport"
LANES: Final = "pdserve.transport.lanes"
"""What the transport moved the bytes over, in its own words; absent where it has no choice."""
FALLBACKS: Final = "pdserve.fallbacks"
CONTINUATIONS: Final = "pdserve.continuations"
RECOMPUTED_TOKENS: Final = "pdserve.recomputed_tokens"
KV_BYTES: Final = "pdserve.kv.bytes"
KV_BLOCKS: Final = "pdserve.kv.blocks"
"""Per layer and rank."""
TTFT: Final = "pdserve.ttft"
"""Seconds, as everything below it."""
UNATTRIBUTED: Final = "pdserve.ttft.unattributed"
RDMA_WAIT: Final = "pdserve.ttft.rdma_wait"
"""Of the part kv.wait, whatever the transport."""
PROXY_SERIALIZATION: Final = "pdserve.ttft.proxy_serialization"
E2E: Final = "pdserve.e2e"
"""Seconds."""
OUTCOME: Final = "pdserve.outcome"
"""finished, failed or cancelled."""
ERROR_TYPE: Final = "error.type"
"""A reason of pdserve.rpc.errors."""
ERROR_MESSAGE: Final = "pdserve.error"


def ttft_part(part: str) -> str:
    """Seconds of one part."""
    return f"pdserve.ttft.{part}"


def raw(interval: str) -> str:
    """Seconds between two stamps as they are: not clamped, may overlap, may be below 0."""
    return f"pdserve.raw.{interval}"


RAW: Final = (
    "prefill.hop",
    "prefill.queue",
    "prefill.forward",
    "proxy.serialization",
    "held_back",
    "write",
    "decode.admit",
    "kv.wait",
    "decode.queue",
    "first_token",
    "detokenize",
    "encode",
    "egress",
    "network",
)
"""`write`: end of the forward pass to the last byte; below 0 where that was in place before. `held_back`:
how long decode was not asked, from the attempt's beginning. `network`: prefill.hop and egress together."""
FORMULA_READ: Final = "pdserve.formula.read"
"""Seconds: prefill.queue + prefill.forward + proxy.serialization + kv.wait + queue(D) + tail, where
queue(D) = decode.admit + decode.queue and tail = first_token + detokenize + encode + network."""
FORMULA_WRITE: Final = "pdserve.formula.write"
"""Seconds: max(prefill.queue + prefill.forward + write, queue(D)) + tail."""

FAILED_AFTER: Final = "pdserve.failed_after"
"""Seconds, as everything below it, from a request's receipt to its end, where its client got no first byte: it has
no `pdserve.ttft` then, and these are no parts of one. Cancelled requests too."""
FAILED_UNATTRIBUTED: Final = "pdserve.failed_after.unattributed"
FAILED_IN: Final = "pdserve.failed_in"
"""The part whose end was not reached; of a request and of an attempt. Its span has the status ERROR."""
FAILED_OR_LATER: Final = "pdserve.failed_in.or_later"
"""Parts after it that may have been reached: who could have stamped that has not said so. Also on the part's span."""
UNSTAMPED: Final = "pdserve.unstamped"
"""Parts before it whose ends were passed and not stamped; what follows them belongs to nobody."""


def failed_after_part(part: str) -> str:
    """Seconds of one part on the way to the failure."""
    return f"pdserve.failed_after.{part}"


# -- attributes of an attempt and of what is below it ----------------------------------------

ATTEMPT_NUMBER: Final = "pdserve.attempt.number"
"""From 1."""
ATTEMPT_TOKENS: Final = "pdserve.attempt.tokens"
"""That the client got from it."""
BLAMED: Final = "pdserve.attempt.blamed"
"""Engine that the next attempt avoids."""
TRANSFER_ID: Final = "pdserve.transfer_id"
"""32 hexadecimal digits."""
PREFILL_ENGINE: Final = "pdserve.prefill.engine_id"
DECODE_ENGINE: Final = "pdserve.decode.engine_id"
CLOCK_OFFSET: Final = "pdserve.clock.offset"
"""Seconds by which another host's monotonic clock was set back to be comparable."""
CLOCK_UNCERTAINTY: Final = "pdserve.clock.uncertainty"
"""Seconds, either way, that the offset may be off."""
KV_LAYERS: Final = "pdserve.kv.layers"
KV_RANKS: Final = "pdserve.kv.ranks"
KV_COPY: Final = "pdserve.kv.copy"
"""Seconds, summed over all copies of the hand-over, which may run side by side."""
KV_RATE: Final = "pdserve.kv.rate"
"""Bytes a second while copying."""
KV_OVERLAPPED: Final = "pdserve.kv.overlapped_bytes"
"""That had landed before prefill's offer."""

# -- OpenTelemetry's semantic conventions for generative AI -----------------------------------

GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_MODEL: Final = "gen_ai.request.model"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_SEED: Final = "gen_ai.request.seed"
GEN_AI_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_CHOICES: Final = "gen_ai.request.choice.count"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

PROVIDER: Final = "pdserve"
CHAT: Final = "chat"
COMPLETION: Final = "text_completion"

# -- metrics ----------------------------------------------------------------------------------
# As Prometheus spells them: the unit is in the name, `_total` counts since the service's start. Kinds,
# labels and meanings: catalogue.py.

BUILD_INFO: Final = "pdserve_build_info"

GEN_AI_DURATION_SECONDS: Final = "gen_ai_server_request_duration_seconds"
GEN_AI_TTFT_SECONDS: Final = "gen_ai_server_time_to_first_token_seconds"
GEN_AI_TPOT_SECONDS: Final = "gen_ai_server_time_per_output_token_seconds"
TTFT_PART_SECONDS: Final = "pdserve_ttft_part_seconds"
ITL_SECONDS: Final = "pdserve_itl_seconds"
REQUESTS_TOTAL: Final = "pdserve_requests_total"
REFUSALS_TOTAL: Final = "pdserve_refusals_total"
ATTEMPTS_TOTAL: Final = "pdserve_attempts_total"
FALLBACKS_TOTAL: Final = "pdserve_fallbacks_total"
CONTINUATIONS_TOTAL: Final = "pdserve_continuations_total"
RECOMPUTED_TOKENS_TOTAL: Final = "pdserve_recomputed_tokens_total"
TOKENS_TOTAL: Final = "pdserve_tokens_total"
KV_BYTES_TOTAL: Final = "pdserve_kv_bytes_total"
KV_OVERLAPPED_BYTES_TOTAL: Final = "pdserve_kv_overlapped_bytes_total"
PROXY_QUEUED: Final = "pdserve_proxy_queued"
PROXY_IN_FLIGHT: Final = "pdserve_proxy_in_flight"
PROXY_ENGINES: Final = "pdserve_proxy_engines"
PROXY_CREDIT_TOKENS: Final = "pdserve_proxy_credit_tokens"
PROXY_ENGINE_REQUESTS: Final = "pdserve_proxy_engine_requests"
PROXY_BEAT_AGE_SECONDS: Final = "pdserve_proxy_beat_age_seconds"
PROXY_SPANS_TOTAL: Final = "pdserve_proxy_spans_total"
PROXY_UNDRAWN_TOTAL: Final = "pdserve_proxy_traces_undrawn_total"

KVD_BLOCKS: Final = "pdserve_kvd_blocks"
KVD_REGION_BYTES: Final = "pdserve_kvd_region_bytes"
KVD_ENGINES: Final = "pdserve_kvd_engines"
KVD_PARTICIPANTS: Final = "pdserve_kvd_participants"
KVD_TRANSFERS: Final = "pdserve_kvd_transfers"
KVD_ENDS: Final = "pdserve_kvd_ends"
KVD_ENDED_TOTAL: Final = "pdserve_kvd_ended_total"
KVD_TRANSFER_SECONDS: Final = "pdserve_kvd_transfer_seconds"
KVD_COPIES_TOTAL: Final = "pdserve_kvd_copies_total"
KVD_COPIED_BYTES_TOTAL: Final = "pdserve_kvd_copied_bytes_total"
KVD_COPY_SECONDS_TOTAL: Final = "pdserve_kvd_copy_seconds_total"
KVD_COPIES_RUNNING: Final = "pdserve_kvd_copies_running"
KVD_FENCES_TOTAL: Final = "pdserve_kvd_fences_total"
KVD_FENCES_WAITED_TOTAL: Final = "pdserve_kvd_fences_waited_total"
KVD_FENCE_SECONDS_TOTAL: Final = "pdserve_kvd_fence_seconds_total"
KVD_FENCE_LONGEST_SECONDS: Final = "pdserve_kvd_fence_longest_seconds"
KVD_FENCES_TORN_DOWN_TOTAL: Final = "pdserve_kvd_fences_torn_down_total"
KVD_EXPIRIES_TOTAL: Final = "pdserve_kvd_expiries_total"
KVD_TIES_BROKEN_TOTAL: Final = "pdserve_kvd_ties_broken_total"
KVD_NOTICES_TOTAL: Final = "pdserve_kvd_notices_total"
KVD_DEFECTS_TOTAL: Final = "pdserve_kvd_defects_total"
KVD_COPIER_INFO: Final = "pdserve_kvd_copier_info"
KVD_DRAINING: Final = "pdserve_kvd_draining"
KVD_PEERS: Final = "pdserve_kvd_peers"
KVD_PEERS_LOST_TOTAL: Final = "pdserve_kvd_peers_lost_total"
KVD_PEER_OPERATIONS: Final = "pdserve_kvd_peer_operations"

ENGINE_INFO: Final = "pdserve_engine_info"
ENGINE_CALLS: Final = "pdserve_engine_calls"
ENGINE_REQUESTS: Final = "pdserve_engine_requests"
ENGINE_KV_TOKENS: Final = "pdserve_engine_kv_tokens"
ENGINE_STEPS_TOTAL: Final = "pdserve_engine_steps_total"
ENGINE_DRAINING: Final = "pdserve_engine_draining"
ENGINE_KVD_ATTACHED: Final = "pdserve_engine_kvd_attached"
ENGINE_HANDOVERS_OPEN: Final = "pdserve_engine_handovers_open"
ENGINE_HANDOVERS_TOTAL: Final = "pdserve_engine_handovers_total"
ENGINE_RECOMPUTING: Final = "pdserve_engine_recomputing"
ENGINE_RECOMPUTES_TOTAL: Final = "pdserve_engine_recomputes_total"
ENGINE_RECOMPUTES_REFUSED_TOTAL: Final = "pdserve_engine_recomputes_refused_total"
ENGINE_BEATS_UNANSWERED: Final = "pdserve_engine_beats_unanswered"
