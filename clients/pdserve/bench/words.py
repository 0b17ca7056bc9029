"""Results as a table for a terminal. Pure."""

from collections.abc import Iterable, Sequence

from pdserve.bench.goodput import unproven
from pdserve.bench.report.words import plain, seconds
from pdserve.bench.results import Goodput, Results, Run, Spread

_HEAD = (
    "offered", "attainment", "good rate", "TTFT p50 / p99", "ITL p50 / p99", "TPOT p50", "E2E p50", "tokens/s out",
    "cached", "failed",
)  # fmt: skip


def report(results: Results) -> str:
    """All runs, one a line, what makes them doubtful, and the goodput where there is one."""
    lines = [table(_HEAD, [_row(run) for run in results.runs])]
    lines += [f"DOUBTFUL, {_offered(run)}: {doubt}" for run in results.runs for doubt in run.doubts]
    if results.goodput:
        lines.append(goodput(results.goodput))
    if results.partial:
        lines.append(f"PARTIAL: {results.why_partial}")
    return "\n".join(lines)


def goodput(found: Goodput) -> str:
    """The goodput in words, with its uncertainty and how it was found."""
    said = (uncertain(found), unproven(found), found.why)
    return f"goodput at {found.threshold:.0%} attainment: {'; '.join(filter(None, said))}"


def uncertain(found: Goodput) -> str:
    """The goodput with its uncertainty: bounds that hold by more than the 95 % interval of a share."""
    if found.value <= 0:
        lowest = min((one.rate for one in found.tried), default=found.high)
        return f"below {plain(lowest)} req/s" if lowest is not None else "0 req/s"
    value, low, high = plain(found.value), plain(found.low), plain(found.high)
    if not found.low:
        return f"{value} req/s (below {high})" if found.high is not None else f"{value} req/s, without bounds"
    if found.high is None:
        return f"at least {low} req/s" if found.low == found.value else f"{value} req/s (at least {low})"
    return f"{value} req/s ({low} to {high})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Aligned columns, the first `left` of them to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def one(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([one(lines[0]), one(["-" * width for width in widths]), *(one(line) for line in lines[1:])])


def _row(run: Run) -> tuple[str, ...]:
    summary = run.summary
    prompts = sum(record.prompt_tokens for record in run.requests)
    cached = sum(record.cached_tokens for record in run.requests) / prompts if prompts else 0.0
    return (
        _offered(run) + (" (partial)" if run.partial else ""),
        f"{summary.attainment:.1%}",
        f"{summary.good_rate:.2f}/s",
        _pair(summary.ttft),
        _pair(summary.itl),
        seconds(summary.tpot.p50) if summary.tpot else "-",
        seconds(summary.e2e.p50) if summary.e2e else "-",
        f"{summary.output_token_throughput:.0f}",
        f"{cached:.0%}",
        f"{summary.failed} of {summary.requests}",
    )


def _offered(run: Run) -> str:
    return f"{plain(run.rate)} req/s" if run.rate is not None else f"{run.concurrency} in flight"


def _pair(spread: Spread | None) -> str:
    return f"{seconds(spread.p50)} / {seconds(spread.p99)}" if spread else "-"
