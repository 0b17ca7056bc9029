"""Results as a table for a terminal. Pure."""

from collections.abc import Sequence

from pdserve.bench.results import Goodput, Results, Run, Spread

_HEAD = (
    "offered", "attainment", "good rate", "TTFT p50 / p99", "ITL p50 / p99", "TPOT p50", "E2E p50", "tokens/s out",
    "cached", "failed",
)  # fmt: skip


def report(results: Results) -> str:
    """All runs, one a line, and the goodput where there is one."""
    lines = [_table([_HEAD, *(_row(run) for run in results.runs)])]
    if results.goodput:
        lines.append(goodput(results.goodput))
    if results.partial:
        lines.append(f"PARTIAL: {results.why_partial}")
    return "\n".join(lines)


def goodput(found: Goodput) -> str:
    """The goodput in words, with its uncertainty."""
    if found.value == 0:
        return f"goodput at {found.threshold:.0%} attainment: below {found.tried[0].rate:g} req/s ({found.why})"
    top = f"{found.high:g}" if found.high is not None else "no upper bound"
    between = f"between {found.low:g} and {top} req/s" if found.high is not None else f"at least {found.low:g} req/s"
    return f"goodput at {found.threshold:.0%} attainment: {found.value:g} req/s, {between} ({found.why})"


def _row(run: Run) -> tuple[str, ...]:
    summary = run.summary
    offered = f"{run.rate:g} req/s" if run.rate is not None else f"{run.concurrency} in flight"
    prompts = sum(record.prompt_tokens for record in run.requests)
    cached = sum(record.cached_tokens for record in run.requests) / prompts if prompts else 0.0
    return (
        offered + (" (partial)" if run.partial else ""),
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


def _pair(spread: Spread | None) -> str:
    return f"{seconds(spread.p50)} / {seconds(spread.p99)}" if spread else "-"


def seconds(value: float) -> str:
    """Seconds or milliseconds, three digits."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
