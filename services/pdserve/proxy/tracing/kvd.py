"""kvd's work on one attempt's hand-over, below the parts in which it was done. Pure.

    prefill.forward           kv.wait
    |........---push---|      |-resolve-|---copy---|-notify-|
             first post                 first post last byte told

What was posted before the forward pass had ended (WRITE) is a push; the wait links to it. Of a wait that
failed, the span whose end was not reached lasts until the failure and has its reason, as the wait itself:

    kv.wait, failed
    |-resolve-|------copy-----X
          first post
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.proxy.ended import Tried
from pdserve.proxy.trace import TraceContext
from pdserve.proxy.tracing import figures
from pdserve.proxy.tracing.draft import Draft
from pdserve.proxy.tracing.layout import Window
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Service, Value

_KVD = Service(names.KVD)


@dataclass(frozen=True, slots=True)
class Hang:
    """The attempt that it is all about."""

    trace: TraceContext
    key: str
    """What the attempt's spans are told from others by."""
    tried: Tried

    def span_id(self, name: str) -> str:
        """Of one of kvd's spans."""
        return self.trace.child_id(self.key, name)


def hang(hang: Hang, name: str, part: Draft) -> Draft:
    """The part with kvd's spans below it, as far as they lie inside."""
    facts = hang.tried.course.facts
    if facts is None or not (facts.first_post_ns or part.status.failed):
        return part
    start, end = part.window.start_ns, part.window.end_ns
    post, landed = facts.first_post_ns or end, facts.last_byte_ns or end
    transfer: dict[str, Value] = {names.TRANSFER_ID: hang.tried.transfer_id}
    if name == "prefill.forward" and post < end:
        said = transfer | figures.of_copies(facts, facts.overlapped_bytes)
        part.children.append(_span(hang, names.KVD_PUSH, max(post, start), min(landed, end), said))
    if name == "kv.wait":
        resolved, copied = min(max(post, start), end), min(max(landed, start), end)
        said = transfer | figures.of_copies(facts, facts.kv_bytes - facts.overlapped_bytes)
        copy = _span(hang, names.KVD_COPY, resolved, copied, said)
        links = [hang.span_id(names.KVD_PUSH)]  # left out again where there was no push
        part.links += links
        copy.links += links
        spans = [
            _span(hang, names.KVD_RESOLVE, min(max(facts.accepted_ns, start), resolved), resolved, transfer),
            copy,
            _span(hang, names.KVD_NOTIFY, copied, end, transfer),
        ]
        if part.status.failed:  # the last that was begun did not end
            spans = spans[: 1 + bool(facts.first_post_ns) + bool(facts.last_byte_ns)]
            spans[-1].status = part.status
        else:
            part.attributes |= figures.of_transfer(facts)
        part.children += spans
    return part


def _span(hang: Hang, name: str, start_ns: int, end_ns: int, said: Mapping[str, Value]) -> Draft:
    return Draft(hang.span_id(name), name, _KVD, Window(start_ns, max(start_ns, end_ns)), attributes=dict(said))
