"""What a service shows of the engine that it hosts, of its calls, and of the hand-overs it heard of."""

from collections.abc import Iterator

from pdserve.engine.hosting.handoff_host import HandoffHost
from pdserve.engine.hosting.program import Parts
from pdserve.runtime.registration import Registration
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry.tally import Reading


def readings(parts: Parts, handoffs: HandoffHost | None, registration: Registration | None) -> Iterator[Reading]:
    """What is true now."""
    role, info, load = parts.role, parts.engine.info, parts.engine.load()
    yield c.ENGINE_INFO, (role, info.engine_id, info.model), 1
    yield c.ENGINE_CALLS, (role,), len(parts.calls)
    yield c.ENGINE_DRAINING, (role,), parts.calls.draining
    yield c.ENGINE_REQUESTS, (role, "running"), load.running
    yield c.ENGINE_REQUESTS, (role, "waiting"), load.waiting
    yield c.ENGINE_KV_TOKENS, (role, "free"), load.free_kv_tokens
    yield c.ENGINE_KV_TOKENS, (role, "used"), load.total_kv_tokens - load.free_kv_tokens
    yield c.ENGINE_STEPS, (role,), load.steps
    if handoffs is not None:
        yield c.ENGINE_KVD_ATTACHED, (role,), handoffs.attached
        yield c.ENGINE_HANDOVERS_OPEN, (role,), handoffs.watching
        for labels, number in handoffs.ended.items():
            yield c.ENGINE_HANDOVERS_ENDED, (role, *labels), number
    if registration is not None:
        yield c.ENGINE_BEATS_UNANSWERED, (role,), registration.unanswered
