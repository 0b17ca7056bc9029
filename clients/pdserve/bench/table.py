"""Results as CSV: one line a request, of all runs."""

import csv
import io
from pathlib import Path

from pdserve.bench.results import Record, Results
from pdserve.bench.slo import ITL_OF, itl_figure
from pdserve.rpc.errors import ConfigError

_HEAD = (
    "run", "rate", "concurrency", "index", "due", "sent", "prompt_tokens", "cached_tokens", "output_tokens",
    "ttft", *(f"itl_{of}" for of in ITL_OF), "tpot", "e2e", "mode", "transport", "missed", "error", "unattributed",
)  # fmt: skip


def to_csv(results: Results) -> str:
    """Seconds and tokens; empty where there is no value; `missed` has a space between names."""
    parts = list(dict.fromkeys(name for run in results.runs for record in run.requests for name in record.parts))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_HEAD, *(f"part.{name}" for name in parts)])
    for number, run in enumerate(results.runs):
        for record in run.requests:
            writer.writerow([number, run.rate, run.concurrency, *_row(record), *map(record.parts.get, parts)])
    return out.getvalue()


def save_csv(results: Results, path: Path) -> None:
    """Writes the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(to_csv(results))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _row(record: Record) -> list[object]:
    return [
        record.index, record.due, record.sent, record.prompt_tokens, record.cached_tokens, record.output_tokens,
        record.ttft, *(itl_figure(record.itls, of) for of in ITL_OF), record.tpot, record.e2e,
        record.mode, record.transport, " ".join(record.missed), record.error.reason if record.error else "",
        record.unattributed,
    ]  # fmt: skip
