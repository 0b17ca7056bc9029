"""`pdserve bench compare`: split serving against colocated engines on the cores of this machine."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.bench.goodput import THRESHOLD
from pdserve.rpc.errors import ConfigError, PdserveError, RequestCancelled

if TYPE_CHECKING:
    from pdserve.bench.compare.comparison import Comparison, Manner
    from pdserve.bench.compare.configurations import Configuration
    from pdserve.bench.compare.folder import Folder
    from pdserve.bench.compare.settings import Settings
    from pdserve.bench.measure import View

TAKES_REST = True
INTERRUPTED = 130
"""Exit status after Ctrl-C, as everywhere in the command."""
_RATES = {"vllm": (0.1, 0.3, 0.6, 1.0), "sim": (2.0, 5.0, 8.0)}
"""Of vLLM on two cores from one at which a colocated pair may hold the objectives to one at which nobody does: goodputs
between them can be divided."""
_REQUESTS = {"vllm": (5, 9, 12, 15), "sim": (100,)}
_LENGTHS = {"vllm": (256, 48), "sim": (2000, 1000)}
REPEATS = {"vllm": 2, "sim": 1}
"""By default: what two cores do within half an hour; of the simulated engine, the published load."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.epilog = (
        "What follows `--` goes to every engine of every configuration. Started again with the same flags and the same "
        "--out, it goes on where it ended; more --repeats or --configurations may be asked for then."
    )
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--model", default="smollm2-135m", help="as `pdserve up --model`; default smollm2-135m")
    parser.add_argument(
        "--configurations", nargs="+", choices=tuple("abcde"), default=list("abcde"), metavar="KEY",
        help="a: one colocated engine, b: two, c: READ, d: WRITE, e: two with a tuned budget; default all",
    )  # fmt: skip
    parser.add_argument("--rates", type=float, nargs="+", metavar="R", help="requests a second, ascending")
    parser.add_argument("--requests", type=int, nargs="+", metavar="N", help="of each rate: one number, or one a rate")
    parser.add_argument("--repeats", type=int, metavar="N", help="of every configuration, interleaved")
    parser.add_argument("--input-len", type=int, metavar="N", help="prompt tokens; default 256, sim 2000")
    parser.add_argument("--output-len", type=int, metavar="N", help="answer tokens; default 48, sim 1000")
    parser.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="of the arrivals; default 1, Poisson"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts; default 0")
    parser.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        metavar="X",
        help=f"attainment of the goodput; default {THRESHOLD}",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="the neighbour's batch; default 8")
    parser.add_argument("--calibration", type=int, default=6, metavar="N", help="requests behind the SLOs; default 6")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="requests of each deployment; default 2")
    parser.add_argument(
        "--budget", type=int, nargs="+", default=[], metavar="N",
        help="token budget of e: one is taken, several are tried; default: found by rule and trial",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="factor on the sim engine's costs; default 1"
    )
    parser.add_argument("--expect-transport", metavar="NAME", default="", help="refuse to measure any other")
    parser.add_argument(
        "--allow-transport", metavar="NAME", action="append", default=[], help="a fallback that is accepted"
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="of a deployment; default 300")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request; default 600")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default compare-ENGINE")
    parser.add_argument("--no-progress", action="store_true", help="no live display")


def run(args: argparse.Namespace) -> int:
    """Measures what the folder does not have, prints the tables, and writes the report.

    Returns:
        0; 130 after Ctrl-C.

    Raises:
        PdserveError: a configuration could not be measured; what there is has been printed and kept.
    """
    from pdserve.bench import machine
    from pdserve.bench.compare import folder
    from pdserve.bench.compare.configurations import chosen

    settings, configurations = settings_of(args), chosen(args.configurations)
    repeats = REPEATS[args.engine] if args.repeats is None else args.repeats
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats: at least 1")
    for name in ("start_timeout", "timeout"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name):g}: a positive number of seconds")
    manner = _manner(args)
    with folder.opened(args.out or Path(f"compare-{args.engine}"), settings, machine.here()) as kept:
        _say(_head(settings, configurations, repeats, kept))
        try:
            stopped = asyncio.run(_compare(kept, settings, manner, configurations, repeats))
        finally:
            _conclude(kept, settings)
    return INTERRUPTED if stopped else 0


def settings_of(args: argparse.Namespace) -> "Settings":
    """What the flags ask for.

    Raises:
        ConfigError: a value that cannot be.
    """
    from pdserve.bench.compare.settings import Settings, per_rate

    rates = tuple(args.rates or _RATES[args.engine])
    given = args.requests or (_REQUESTS[args.engine] if not args.rates else _REQUESTS[args.engine][-1:])
    prompt, answer = _LENGTHS[args.engine]
    return Settings(
        engine=args.engine,
        model=args.model if args.engine == "vllm" else "",
        rates=rates,
        requests=per_rate(given, rates),
        input_len=prompt if args.input_len is None else args.input_len,
        output_len=answer if args.output_len is None else args.output_len,
        burstiness=args.burstiness,
        seed=args.seed,
        threshold=args.threshold,
        batch=args.batch,
        calibration=args.calibration,
        warmup=args.warmup,
        budgets=tuple(args.budget),
        scale=args.scale,
        engine_args=tuple(args.rest),
    )


async def _compare(
    kept: "Folder", settings: "Settings", manner: "Manner", configurations: "tuple[Configuration, ...]", repeats: int
) -> bool:
    """Whether it was stopped."""
    from pdserve.bench.compare.comparison import Comparison

    comparison = Comparison(kept, settings, manner)
    try:
        with _signals(comparison):
            await comparison.run(configurations, repeats)
    except RequestCancelled as error:
        if not comparison.stopped:
            raise
        _say(f"stopped: {error.message}")
        return True
    return False


@contextlib.contextmanager
def _signals(comparison: "Comparison") -> Iterator[None]:
    """The first asks for an end in order, the second for haste."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, comparison.stop, f"ended by {number.name}")
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _manner(args: argparse.Namespace) -> "Manner":
    from pdserve.bench import options, progress
    from pdserve.bench.compare.comparison import Manner

    def view() -> "AbstractContextManager[View]":
        return progress.shown(plain=args.no_progress)

    return Manner(options.expected(args), args.start_timeout, args.timeout, _say, view)


def _head(settings: "Settings", configurations: "tuple[Configuration, ...]", repeats: int, kept: "Folder") -> str:
    from pdserve.bench.compare.settings import estimate
    from pdserve.bench.compare.tables import head

    known = kept.state.budget is not None or len(settings.budgets) == 1
    trials = 0 if known or not any(one.tuned for one in configurations) else (len(settings.budgets) or 3)
    seconds = estimate(settings, len(configurations), repeats, trials)
    return head(settings, configurations, repeats, kept.state.machine, seconds)


def _conclude(kept: "Folder", settings: "Settings") -> None:
    """Tables, compare.json with what follows from the runs, the pooled results and their report; of what there is."""
    from pdserve.bench.compare import tables
    from pdserve.bench.compare.outcome import outcome
    from pdserve.bench.compare.sections import sections

    found = outcome([(cell, kept.results(cell)) for cell in kept.whole()], settings.threshold)
    if not found.curves:
        return
    kept.write(curves=[one.told() for one in found.curves], ratios=found.ratios)
    _say("\n" + tables.report(settings, found.curves, found.ratios, kept.whole()))
    try:
        from pdserve.bench import report
        from pdserve.bench.compare.chapter import chapter

        shown = chapter(settings, kept.state, sections(settings, found.curves, found.ratios, kept.whole()))
        page = kept.path / "report.html"
        report.write_html(found.pooled, page, rate=found.rate, letters=found.letters, chapters=(shown,))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pdserve"):
            raise
        _say(f"no report.html: it needs {error.name}, of the extra `bench`")
    _say(f"\nresults, compare.json and report.html are in {kept.path}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """`python -m pdserve.bench.compare`, for the exit status and errors of the `pdserve` command."""
    parser = argparse.ArgumentParser(prog="pdserve bench compare", allow_abbrev=False)
    arguments(parser)
    words = sys.argv[1:]
    cut: Any = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.rest = words[cut + 1 :]
    try:
        return run(args)
    except PdserveError as error:
        sys.stderr.write(f"pdserve: {error.message} ({error.reason})\n")
        return 1
