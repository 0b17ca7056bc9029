"""Writes the tables of docs/metrics.md out of the catalogue of metrics, or says that they are not the same.

python scripts/metrics_table.py            # writes
python scripts/metrics_table.py --check    # status 1 where it would change anything
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pdserve.runtime.telemetry import catalogue
from pdserve.runtime.telemetry.catalogue import Metric

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
ENGINE_ONLY = {metric.name for metric in catalogue.DECODE} - {metric.name for metric in catalogue.ENGINE}
TABLES = {
    "every": (catalogue.BUILD_INFO,),
    "proxy": catalogue.PROXY[1:],
    "kvd": catalogue.KVD[1:],
    "engine": catalogue.DECODE[1:],
}


def table(metrics: Sequence[Metric]) -> str:
    """As Markdown."""
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        what = f"Decode only. {metric.help}" if metric.name in ENGINE_ONLY else metric.help
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {what} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """A document whose tables are as the catalogue says. Each stands between two comments.

    Raises:
        ValueError: a table has no place.
    """
    for name, metrics in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"{DOCS.name} has no place for the table {name}")
        text = f"{before}{begin}{table(metrics)}{end}{after}"
    return text


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where something would")
    args = parser.parse_args()
    text = DOCS.read_text()
    new = filled(text)
    if args.check:
        return int(new != text)
    DOCS.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
