"""Numbers and tables as people read them; pure."""

from collections.abc import Sequence

from pdserve.client import Completion


def size(count: int) -> str:
    """Bytes in the unit that leaves at most four digits before the point."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def rate(bytes_per_second: float) -> str:
    """In GB/s, and in MB/s below a tenth of one."""
    value = bytes_per_second / 1e9
    return f"{value:.2f} GB/s" if value >= 0.1 else f"{value * 1000:.2f} MB/s"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with a digit after the point below 100."""
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns: the first `left` to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def one(line: Sequence[str]) -> str:
        cells = [
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([one(lines[0]), one(["-" * width for width in widths]), *(one(line) for line in lines[1:])])


def summary(done: Completion) -> str:
    """One answer's facts in one line."""
    usage, timings = done.usage, done.timings
    facts = [
        done.mode or _alone(done),
        f"{usage.prompt_tokens} tokens in ({usage.cached_tokens} cached), {usage.completion_tokens} out",
        f"TTFT {milliseconds(timings.ttft_seconds)} ms",
        f"{timings.e2e_seconds:.2f} s in all",
    ]
    if done.transfer:
        speed = done.transfer.gigabytes_per_second
        over = f" ({done.transfer.lanes})" if done.transfer.lanes else ""
        facts.append(f"KV {size(done.kv_bytes)} over {done.transport}{over} at {rate(speed * 1e9)}")
    if done.fallbacks:
        facts.append(f"{done.fallbacks} fallback{'s' if done.fallbacks > 1 else ''}")
    if done.continuations:
        facts.append(f"continued {done.continuations} times")
    return ", ".join([*facts, f"request {done.request_id}"])


def _alone(done: Completion) -> str:
    """Who answered where nothing was handed over. A colocated engine that took over recomputes nothing."""
    return "computed by decode" if done.recomputed_tokens else "colocated"
