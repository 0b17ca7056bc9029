"""One trace under test, wherever it comes from: a sink in the process, or a collector's wire."""

import itertools
from collections.abc import Sequence

from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Span

HANDED_OVER = (
    *("tokenize", "admit", "route", "prefill.hop", "prefill.queue", "prefill.forward", "proxy.serialization"),
    *("decode.admit", "kv.wait", "decode.queue", "decode.first_step", "detokenize", "encode", "egress"),
)
"""The parts of a request that was handed over, in order."""


class Trace:
    """One of them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.root = spans[0]
        self.by_id = {span.span_id: span for span in spans}
        assert len(self.by_id) == len(spans), "no id twice"

    def named(self, name: str) -> list[Span]:
        """In the order of their starts."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def one(self, name: str) -> Span:
        """The only one of this name."""
        (span,) = self.named(name)
        return span

    def figure(self, name: str) -> float:
        """A number of the root."""
        value = self.root.attributes[name]
        assert isinstance(value, int | float)
        return value

    def parts(self) -> dict[str, float]:
        """Seconds of each part of TTFT."""
        every = (*HANDED_OVER, "decode.hop", names.RETRY)
        return {
            part: self.figure(names.ttft_part(part)) for part in every if names.ttft_part(part) in self.root.attributes
        }

    def check(self, off_ns: int = 0) -> None:
        """What holds of every trace: names, ids, places. `off_ns`: what two of its times may be off against each
        other, where they have come as floats."""
        assert self.root.name == names.REQUEST
        assert {span.name for span in self.spans} <= names.SPANS
        assert {span.trace_id for span in self.spans} == {self.root.trace_id}
        below: dict[str, list[Span]] = {}
        for span in self.spans[1:]:
            parent = self.by_id[span.parent_id]
            assert parent.start_ns - off_ns <= span.start_ns < span.end_ns <= parent.end_ns + off_ns, span
            below.setdefault(span.parent_id, []).append(span)
        for siblings in below.values():
            ordered = sorted(siblings, key=lambda span: span.start_ns)
            for earlier, later in itertools.pairwise(ordered):
                assert later.start_ns - earlier.end_ns >= 2_000 - off_ns, (earlier.name, later.name)
        for span in self.spans:
            assert all(link.span_id in self.by_id for link in span.links)
        if names.TTFT in self.root.attributes:
            explained = sum(self.parts().values()) + self.figure(names.UNATTRIBUTED)
            assert round(explained * 1e9) == round(self.figure(names.TTFT) * 1e9)
