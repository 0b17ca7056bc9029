"""`pdserve bench`: offers a load, says how many requests met their objectives; `bench report` of what was kept; and
`bench compare` of whole deployments."""

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.extra import needs
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.endpoint import Asking, Endpoint
    from pdserve.bench.measure import Setup
    from pdserve.bench.plan import Plan
    from pdserve.bench.results import Results
    from pdserve.bench.workload.files import CountTokens

TAKES_REST = True
"""What follows `--` is for the engines that `bench compare` starts."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as everywhere in the command."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, `report FILE...` and `compare`."""
    try:
        with needs("bench", "bench"):
            from pdserve.bench import options
            from pdserve.bench.compare import command as compare
    except ConfigError as error:
        parser.exit(1, f"pdserve: {error.message} ({error.reason})\n")
    actions = parser.add_subparsers(dest="action", metavar="[report FILE... | compare]")
    report = actions.add_parser("report", help="an HTML page of any number of results", allow_abbrev=False)
    report.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what `--out` wrote; the first is the base")
    report.add_argument("--report", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    report.add_argument("--png", type=Path, metavar="FOLDER", help="the page's figures")
    report.add_argument(
        "--at",
        type=float,
        metavar="RATE",
        help="compare at this offered rate; default: the highest that most files have",
    )
    compare.arguments(
        actions.add_parser("compare", help="split against colocated engines on this machine", allow_abbrev=False)
    )
    options.add(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the figures on stdout and keeps what was asked for.

    Returns:
        0; 1 where the results are partial; 130 after Ctrl-C.

    Raises:
        PdserveError: nothing was measured.
    """
    with needs("bench", "bench"):
        if args.action == "compare":
            from pdserve.bench.compare import command as compare

            return compare.run(args)
        if args.rest:
            raise ConfigError("only `pdserve bench compare` starts engines that could take what follows `--`")
        return _report(args) if args.action == "report" else _measure(args)


def _report(args: argparse.Namespace) -> int:
    from pdserve.bench.results import load

    _check_outputs((args.report,), args.png)
    _write_report([load(path) for path in args.files], args.report, args.png, args.at)
    return 0


def _measure(args: argparse.Namespace) -> int:
    from pdserve.bench import options, plan, words

    plans = plan.make(options.wanted(args), _counter(args.tokenizer))
    asking = options.asking(args)
    _check_outputs((args.out, args.csv, args.report), args.png)
    results, interrupted = asyncio.run(_run(args, plans, asking))
    print_ = sys.stdout.write
    print_(f"{words.report(results)}\n")
    if args.out:
        print_(f"results in {args.out}\n")
    if args.csv:
        from pdserve.bench.table import save_csv

        save_csv(results, args.csv)
    if args.report or args.png:
        _write_report([results], args.report, args.png)
    if interrupted:
        return INTERRUPTED
    return 1 if results.partial else 0


async def _run(args: argparse.Namespace, plan: "Plan", asking: "Asking") -> "tuple[Results, bool]":
    """The results, and whether Ctrl-C ended them."""
    from pdserve.bench import progress
    from pdserve.bench.measure import Measurement
    from pdserve.bench.results import save
    from pdserve.bench.runner import Brake

    brake = Brake(args.give_up)
    interrupted = False

    def stop(number: signal.Signals) -> None:
        nonlocal interrupted
        interrupted = number is signal.SIGINT
        asyncio.get_running_loop().remove_signal_handler(number)  # a second one ends the process
        brake.pull(f"ended by {number.name}")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    async with _endpoint(args, asking) as (endpoint, setup):
        with progress.shown(plain=args.no_progress) as view:
            # What there is by now stays: the collector need not look at it between two tokens.
            gc.collect()
            gc.freeze()
            keep = (lambda results: save(results, args.out)) if args.out else (lambda _: None)
            measurement = Measurement(plan, endpoint, setup, brake, view, keep=keep)
            results = await measurement.run()
    return results, interrupted


@contextlib.asynccontextmanager
async def _endpoint(args: argparse.Namespace, asking: "Asking") -> "AsyncIterator[tuple[Endpoint, Setup]]":
    from pdserve.bench import machine, options
    from pdserve.bench.ask_kvd import ask
    from pdserve.bench.measure import MEET_S, Setup

    kvd = f"unix:{args.kvd}" if args.kvd else ""
    expected = options.expected(args)  # before there is something to close
    endpoint: Endpoint
    if args.url:
        from pdserve.bench.over_http import HttpEndpoint

        address, api = args.url, "http"
        endpoint = await HttpEndpoint.open(args.url, asking)
    else:
        from pdserve.bench.over_grpc import GrpcEndpoint

        address, api = args.target, "grpc"
        if not address:
            from pdserve.cli import deployment

            record = deployment.find(args.state_dir)
            address, kvd = record.grpc, kvd or record.kvd
        endpoint = GrpcEndpoint(address, asking)
    setup = Setup(
        address=address,
        api="http" if api == "http" else "grpc",
        asking=asking,
        expected=expected,
        machine=machine.here(),
        label=args.label,
        warmups=args.warmups,
        ask_kvd=(lambda: ask(kvd, MEET_S)) if kvd else None,
    )
    async with contextlib.aclosing(endpoint):
        yield endpoint, setup


def _write_report(
    results: "Sequence[Results]", page: Path | None, pictures: Path | None, rate: float | None = None
) -> None:
    from pdserve.bench import report

    if page:
        report.write_html(results, page, rate=rate)
        sys.stdout.write(f"report in {page}\n")
    if pictures:
        for path in report.write_pngs(list(results), pictures, rate=rate):
            sys.stdout.write(f"figure in {path}\n")


def _check_outputs(files: Sequence[Path | None], folder: Path | None) -> None:
    """Makes sure, before anything is measured, that what is measured can be kept.

    Raises:
        ConfigError: a file or a folder that cannot be written.
    """
    for path in filter(None, files):
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(
                f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder, or closed'}"
            )
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {folder}: {error.strerror or error}") from error


def _counter(path: Path | None) -> "CountTokens | None":
    """Counts tokens with a tokenizer.json; None without one."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} is no tokenizer.json: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
