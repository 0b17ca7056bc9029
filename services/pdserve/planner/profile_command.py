"""`pdserve profile`: measures a running deployment, fits the cost model, and writes it down for `pdserve plan`."""

import argparse
import asyncio
import datetime
import os
import random
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.extra import needs
from pdserve.rpc.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from pdserve.planner.measuring.design import Design
    from pdserve.planner.measuring.points import Measured


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured and where it goes."""
    from pdserve.cli import options

    parser.epilog = (
        "Nothing else may run there meanwhile. A pair gives the hand-over, an engine that serves whole requests gives "
        "steps that carry a prompt beside a batch: `pdserve up --prefill 1 --decode 1 --both 1` has both."
    )
    options.add_target(parser)
    parser.add_argument("--model", default="", help="default: the deployment's only one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the profile; default: NAME.toml")
    parser.add_argument("--name", default="measured", help="of the profile; default measured")
    parser.add_argument("--about", default="", metavar="TEXT", help="hardware and model, for people")
    parser.add_argument("--prompts", type=options.count, nargs="+", metavar="N", help="prompt lengths, tokens")
    parser.add_argument("--batches", type=options.count, nargs="+", metavar="N", help="sequences that decode at once")
    parser.add_argument("--contexts", type=options.count, nargs="+", metavar="N", help="their prompts' lengths, tokens")
    parser.add_argument("--steps", type=options.count, metavar="N", help="of a batch to watch; default 40")
    parser.add_argument("--repeats", type=options.count, metavar="N", help="of everything; default 3")
    parser.add_argument("--token-budget", type=options.count, metavar="N", help="the engines' most tokens in a step")
    parser.add_argument(
        "--max-seqs", type=options.count, metavar="N", help="most sequences that an engine runs at once"
    )
    parser.add_argument("--accelerators", type=options.count, default=1, metavar="N", help="of one engine; default 1")
    parser.add_argument(
        "--most-residual", type=options.seconds, default=0.2, metavar="X", help="that a fit may leave; default 0.2"
    )
    parser.add_argument("--keep", action="store_true", help="write FILE, marked, though it does not fit")
    parser.add_argument("--seed", type=int, metavar="N", help="of the prompts; default: a new one")
    parser.add_argument("--timeout", type=options.seconds, default=300.0, metavar="S", help="of a request; default 300")


def run(args: argparse.Namespace) -> int:
    """Measures, prints the fits and writes the profile.

    Returns:
        0.

    Raises:
        ConfigError: nothing to measure, a place that cannot be written (before anything is measured), or a fit that
            leaves too much over: it is written beside, marked, and with --keep where it was wanted.
        PdserveError: a request failed. Where what was measured before can be fitted it is written beside, marked.
    """
    with needs("plan", "profile"):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from pdserve.cli import options
    from pdserve.planner.measuring import fits, making
    from pdserve.planner.measuring.table import table
    from pdserve.planner.profile_file import dumps, parse

    design = _design(args)
    path = args.out or Path(f"{args.name}.toml")
    _check_writable(path)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    # The profile is what comes out on stdout; how far it is goes beside it.
    sys.stderr.write(f"seed {seed}\n")
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    measured = asyncio.run(_measure(options.target(args), design, seed))
    try:
        fitted = fits.fit(measured)
    except ConfigError as error:
        if not measured.broke_off:
            raise
        said = f"the measurement broke off: {measured.broke_off}; too little was measured to be kept: {error.message}"
        raise Unavailable(said) from error
    sys.stdout.write(f"{table(fitted)}\n")
    misfits = fits.misfits(fitted, args.most_residual)
    facts = making.Facts(args.name, args.about, when, _machine(), args.accelerators, args.max_seqs)
    text = dumps(making.profile(measured, fitted, facts, misfits))
    parse(text, args.name)  # what is written can be read
    if measured.broke_off:
        beside = path.with_name(f"{path.stem}.partial{path.suffix}")
        _write(beside, text)
        raise Unavailable(
            f"the measurement broke off: {measured.broke_off}; the profile of what was measured, marked, is in {beside}"
        )
    if misfits and not args.keep:
        beside = path.with_name(f"{path.stem}.misfit{path.suffix}")
        _write(beside, text)
        raise ConfigError(
            f"the cost model does not fit what was measured: {'; '.join(misfits)}. Measure again on an idle machine; "
            f"the profile, marked, is in {beside} (--keep writes it to {path})"
        )
    _write(path, text)
    sys.stdout.write(f"profile in {path}{' (marked: it does not fit)' if misfits else ''}\n")
    return 0


def _check_writable(path: Path) -> None:
    """Raises ConfigError where a file could not be written there; leaves what is there as it is."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: no permission")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _design(args: argparse.Namespace) -> "Design":
    from pdserve.planner.measuring.design import Design

    usual = Design()
    return Design(
        prompts=tuple(args.prompts or usual.prompts),
        batches=tuple(args.batches or usual.batches),
        contexts=tuple(args.contexts or usual.contexts),
        answer=args.steps or usual.answer,
        repeats=args.repeats or usual.repeats,
        token_budget=args.token_budget,
        model=args.model,
        timeout=args.timeout,
    )


async def _measure(target: str, design: "Design", seed: int) -> "Measured":
    from pdserve.client import AsyncClient, Retry
    from pdserve.planner.measuring.live import measure

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    async with AsyncClient(target, retry=Retry(attempts=1)) as client:  # what is asked twice is no measurement
        return await measure(client, design, random.Random(seed), say)


def _machine() -> str:
    from pdserve.bench.machine import here

    machine = here()
    return f"{machine.cpu}, {machine.cores} cores"
