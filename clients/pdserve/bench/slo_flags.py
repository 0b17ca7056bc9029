"""The flags that say what is good, `--slo-*`, for every command that takes objectives."""

import argparse
from typing import Any

from pdserve.bench.slo import ITL_OF, Slo


def add(group: Any) -> None:
    """Adds them to a parser or a group of one."""
    for name, words in (
        ("ttft", "to the first token"),
        ("itl", "between tokens of a request"),
        ("tpot", "a token after the first"),
        ("e2e", "to the last token"),
    ):
        group.add_argument(f"--slo-{name}", type=float, metavar="S", help=f"most seconds {words}")
    group.add_argument("--slo-itl-of", choices=ITL_OF, default="p99", help="which ITL of a request; default p99")


def of(args: argparse.Namespace) -> Slo:
    """The objectives that were asked for.

    Raises:
        ConfigError: one that cannot be.
    """
    return Slo(args.slo_ttft, args.slo_itl, args.slo_itl_of, args.slo_tpot, args.slo_e2e)
