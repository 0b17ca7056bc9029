"""`pdserve plan`: colocated or split, READ or WRITE, and how many engines of each, for a workload and its SLOs."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench import slo_flags
from pdserve.bench.extra import needs
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.slo import Slo
    from pdserve.planner.planning.decision import Settings
    from pdserve.planner.planning.metrics import Reading
    from pdserve.planner.planning.plan import Plan
    from pdserve.planner.planning.workload import Workload
    from pdserve.planner.profile import Profile

_WINDOW_S = 60.0
_OF_WORKLOAD = (
    "scenario", "input_len", "output_len", "hit_rate", "rate", "concurrency", "burstiness", "trace",
)  # fmt: skip
"""Flags that say what is asked."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the engines, the workload, the SLOs and what comes out."""
    parser.epilog = "docs/planning.md tells how to decide, with an example from profile to measurement."
    what = parser.add_argument_group("what there is")
    what.add_argument(
        "--profile", required=True, action="append", metavar="NAME|FILE",
        help="a shipped profile, or what `profile` wrote; more of them: engines of other sizes, to be weighed beside",
    )  # fmt: skip
    count = what.add_mutually_exclusive_group()
    count.add_argument("--engines", type=int, metavar="N", help="engines to use; with --watch: what runs there")
    count.add_argument(
        "--gpus", type=int, metavar="N", help="accelerators to use, as many an engine as the profile says"
    )
    work = parser.add_argument_group("what is asked of it")
    work.add_argument("--scenario", default="", metavar="NAME", help="prompt and answer tokens, by name, as 2K/1K")
    work.add_argument("--input-len", metavar="N[-M]", help="prompt tokens, or an even range of them")
    work.add_argument("--output-len", metavar="N[-M]", help="answer tokens, or an even range of them")
    work.add_argument("--hit-rate", type=float, metavar="X", help="share of a prompt found in a prefix cache")
    work.add_argument("--rate", type=float, metavar="R", help="requests a second; with --trace: in place of its own")
    work.add_argument("--concurrency", type=int, metavar="N", help="requests in flight, in place of a rate")
    work.add_argument("--burstiness", type=float, metavar="X", help="1 Poisson, less bursts; default 1")
    work.add_argument("--trace", type=Path, metavar="FILE", help="a recorded trace as JSON lines, as `bench` takes it")
    work.add_argument("--watch", metavar="URL", help="a proxy whose metrics tell the workload, http://HOST:PORT")
    work.add_argument("--window", type=float, metavar="S", help="that is watched; default 60 s")
    work.add_argument("--once", action="store_true", help="with --watch: plan once, after one window")
    good = parser.add_argument_group("what is good")
    slo_flags.add(good)
    out = parser.add_argument_group("what comes out")
    out.add_argument("--cost-per-engine-hour", type=float, metavar="X", help="for the cost of a million tokens")
    out.add_argument("--json", action="store_true", help="print the plan as JSON")
    out.add_argument("--report", type=Path, metavar="FILE", help="the plan as a .html page or a .png picture")
    out.add_argument("--seed", type=int, default=0, metavar="N", help="the first of the runs' seeds; default 0")
    out.add_argument("--requests", type=int, metavar="N", help="of a run; default: by how long answers take, to 4000")
    out.add_argument("--quick", action="store_true", help="leave out goodput, what binds and what would change it")
    out.add_argument("--allow-misfit", action="store_true", help="plan with a profile that does not fit")


def run(args: argparse.Namespace) -> int:
    """Plans and prints.

    Returns:
        0.

    Raises:
        ConfigError: a profile, workload or SLO that nothing can be planned for; it says why.
    """
    with needs("plan", "plan"):
        profile, slo, settings = _profile(args), slo_flags.of(args), _settings(args)
        if args.report is not None:
            from pdserve.planner.planning import page

            page.check(args.report)
        if args.watch is not None:
            return _watch(args, profile, slo, settings)
        if args.once or args.window is not None:
            raise ConfigError("--once and --window are of --watch: give it an address")
        workload = _workload(args)
        if args.engines is None and args.gpus is None:
            raise ConfigError("say how many engines there are with --engines, or accelerators with --gpus")
        from pdserve.planner.planning.candidates import Budget
        from pdserve.planner.planning.decision import decide
        from pdserve.planner.planning.trial import Question

        _show(args, decide(Question(profile, workload, slo), Budget(args.engines, args.gpus), settings))
    return 0


def _profile(args: argparse.Namespace) -> "Profile":
    """The first, with the others beside it."""
    from pdserve.planner.profile_file import load

    first, *others = (load(name) for name in args.profile)
    return replace(first, siblings=tuple(others))


def _settings(args: argparse.Namespace) -> "Settings":
    from pdserve.planner.planning.decision import Settings

    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: not below 0")
    more = not args.quick
    return Settings(args.seed, args.requests, more, more, more, args.cost_per_engine_hour, args.allow_misfit)


def _workload(args: argparse.Namespace) -> "Workload":
    """What the flags say.

    Raises:
        ConfigError: too little, too much, or a trace that cannot be read.
    """
    from pdserve.bench.workload.lengths import Span, parse_span
    from pdserve.bench.workload.scenarios import SCENARIOS
    from pdserve.planner.planning.workload import Workload, of_trace

    if args.trace is not None:
        if given := _given(args, *(name for name in _OF_WORKLOAD if name not in ("rate", "trace"))):
            raise ConfigError(
                f"a trace has its own lengths, hits and times: leave out {given}; only --rate can be given"
            )
        from pdserve.bench.workload.files import read_trace

        return of_trace(*read_trace(args.trace), args.rate, str(args.trace))
    if args.scenario:
        if args.input_len or args.output_len:
            raise ConfigError("a scenario has its own lengths: give it, or --input-len and --output-len")
        if args.scenario not in SCENARIOS:
            raise ConfigError(f"no scenario {args.scenario}: there are {', '.join(SCENARIOS)}")
        prompt, output = (Span(length, length) for length in SCENARIOS[args.scenario])
    elif args.input_len and args.output_len:
        prompt, output = parse_span(args.input_len), parse_span(args.output_len)
    else:
        raise ConfigError("say what is asked: --scenario, --input-len and --output-len, --trace, or --watch")
    if args.rate is None and args.concurrency is None:
        raise ConfigError("say how much is asked: --rate in requests a second, or --concurrency in flight")
    if args.concurrency is not None and args.burstiness is not None:
        raise ConfigError("--burstiness is of arrivals at a --rate: with --concurrency there are none")
    hits, bursts = args.hit_rate or 0.0, 1.0 if args.burstiness is None else args.burstiness
    return Workload(prompt, output, hits, args.rate, args.concurrency, bursts)


def _show(args: argparse.Namespace, plan: "Plan") -> None:
    from pdserve.planner.planning import words

    if args.json:
        from pdserve.planner.planning.document import document

        sys.stdout.write(json.dumps(document(plan)) + "\n")
    else:
        sys.stdout.write(words.report(plan) + "\n")
    sys.stdout.flush()
    if args.report is not None:
        from pdserve.planner.planning import page

        page.write(plan, args.report)
        if not args.json:
            sys.stdout.write(f"report in {args.report}\n")


def _watch(args: argparse.Namespace, profile: "Profile", slo: "Slo", settings: "Settings") -> int:
    """Plans for each window of what a proxy says, until Ctrl-C."""
    from pdserve.planner.planning import metrics
    from pdserve.planner.planning.candidates import Budget
    from pdserve.planner.planning.decision import check_profile, decide
    from pdserve.planner.planning.present import layout
    from pdserve.planner.planning.trial import Question
    from pdserve.planner.watching import watch

    if given := _given(args, *_OF_WORKLOAD):
        raise ConfigError(f"--watch reads the workload: leave out {given}")
    # What no window can mend is refused before the first one.
    for one in profile.family:
        check_profile(one, settings)
    if profile.siblings and args.gpus is None:
        raise ConfigError("engines of several profiles differ in size: say how many accelerators with --gpus")
    if slo.empty:
        raise ConfigError("at a given rate and without an SLO every way is as good: give an SLO")

    def plan(workload: "Workload", now: "Reading", modes: Mapping[str, float]) -> None:
        count = args.engines if args.engines is not None or args.gpus is not None else sum(now.engines.values())
        if not args.json:
            sys.stdout.write(f"{args.watch}: {metrics.deployed(now.engines)}\n")
        runs = layout(now.engines, modes, profile.name if profile.siblings else "")
        _show(args, decide(Question(profile, workload, slo), Budget(count, args.gpus), settings, runs))

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    watch(args.watch, _WINDOW_S if args.window is None else args.window, plan, say, once=args.once)
    return 0


def _given(args: argparse.Namespace, *names: str) -> str:
    """Those flags of the named that were given, in words; empty where none was."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, ""))
