"""W3C trace context: a good header is joined, a bad one starts a new trace."""

import pytest

from pdserve.proxy.trace import accept

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def count(size: int) -> bytes:
    """Known bytes for random ones."""
    return bytes(range(1, size + 1))


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_good_header_is_joined(flags: str, sampled: bool) -> None:
    """Same trace, the caller's span is the parent, the verdict on sampling is kept."""
    context = accept(f"00-{TRACE}-{SPAN}-{flags}", count)
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, SPAN, sampled)
    assert context.traceparent == f"00-{TRACE}-0102030405060708-{'01' if sampled else '00'}"


def test_a_newer_version_may_say_more() -> None:
    """What follows in a version that we do not know is ignored."""
    assert accept(f"01-{TRACE}-{SPAN}-01-more", count).trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_a_bad_header_starts_a_new_trace(header: str) -> None:
    """As the standard says; such a request is a root and sampled."""
    context = accept(header, count)
    assert context.trace_id == count(16).hex()
    assert (context.parent_id, context.sampled) == ("", True)
