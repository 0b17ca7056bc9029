"""The flags of `pdserve bench`, and what was said with them. Imports nothing heavy: `--help` answers at once."""

import argparse
import secrets
from pathlib import Path
from typing import Any, get_args

from pdserve.bench import slo_flags
from pdserve.bench.endpoint import Asking
from pdserve.bench.goodput import THRESHOLD, Search
from pdserve.bench.plan import REQUESTS, Kind, Wanted
from pdserve.bench.runner import GIVE_UP
from pdserve.bench.transport import FALLBACKS, Expected
from pdserve.bench.workload.lengths import parse_span
from pdserve.bench.workload.prompts import Sharing, TokenRange
from pdserve.bench.workload.scenarios import SCENARIOS
from pdserve.rpc.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    """Adds all of them."""
    _where(parser.add_argument_group("what is measured"))
    _what(parser.add_argument_group("what is sent"))
    _when(parser.add_argument_group("how much load"))
    _good(parser.add_argument_group("what is good"))
    _out(parser.add_argument_group("what comes out"))


def _where(group: Any) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument("--target", metavar="HOST:PORT", help="gRPC address of a proxy; default: what runs here")
    which.add_argument("--url", metavar="URL", help="any OpenAI endpoint, http://HOST:PORT; over HTTP")
    group.add_argument("--state-dir", type=Path, metavar="FOLDER", help="of the `pdserve up` to measure")
    group.add_argument("--kvd", type=Path, metavar="SOCKET", help="gRPC socket of a kvd to ask for its transport")
    group.add_argument("--model", default="", help="default: the endpoint's only one")
    group.add_argument("--mode", choices=("read", "write"), default="", help="default: the deployment's")
    group.add_argument("--route", choices=("split", "split_or_colocated", "colocated"), default="")
    group.add_argument("--expect-transport", metavar="NAME", default="", help="refuse to measure any other")
    group.add_argument(
        "--allow-transport", metavar="NAME", action="append", default=[], help=f"a fallback: {_listed(FALLBACKS)}"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request; default 600")
    group.add_argument(
        "--give-up", type=int, default=GIVE_UP, metavar="N",
        help=f"break off after so many failures in a row; 0: never; default {GIVE_UP}",
    )  # fmt: skip


def _what(group: Any) -> None:
    group.add_argument("--scenario", choices=tuple(SCENARIOS), default="", help="prompt and answer tokens, by name")
    group.add_argument("--input-len", metavar="N[-M]", help="prompt tokens, or an even range of them")
    group.add_argument("--output-len", metavar="N[-M]", help="answer tokens; with --dataset: in place of its own")
    group.add_argument("--dataset", type=Path, metavar="FILE", help="prompts as JSON lines, or as ShareGPT has them")
    group.add_argument("--trace", type=Path, metavar="FILE", help="a recorded trace as JSON lines, replayed")
    group.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json that counts a data set's tokens")
    group.add_argument("--requests", type=int, metavar="N", help=f"of each run; default {REQUESTS}, or all of a file")
    group.add_argument("--hit-rate", type=float, metavar="X", help="share of prompt tokens that a prefix cache finds")
    group.add_argument("--prefix-groups", type=int, default=1, metavar="N", help="prefixes in turn; default 1")
    group.add_argument("--prefix-block", type=int, default=16, metavar="N", help="tokens of a block; default 16")
    group.add_argument(
        "--token-ids", type=int, nargs=2, default=(100, 255), metavar=("LOW", "HIGH"),
        help="prompts are made of these; default 100 255",
    )  # fmt: skip
    group.add_argument("--no-ignore-eos", action="store_true", help="answers may end early; for endpoints without it")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals; default 0")
    group.add_argument("--content-seed", type=int, metavar="N", help="of the prompts' tokens; default: a new one")
    group.add_argument("--warmups", type=int, default=0, metavar="N", help="requests before the first run; default 0")


def _when(group: Any) -> None:
    group.add_argument("--rate", type=float, nargs="+", metavar="R", help="requests a second, a run each: open loop")
    group.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="in flight, a run each: closed loop")
    group.add_argument(
        "--goodput", type=float, nargs="?", const=THRESHOLD, metavar="X",
        help=f"search for the highest rate with this attainment; default {THRESHOLD}",
    )  # fmt: skip
    group.add_argument("--min-rate", type=float, metavar="R", help="where the search begins")
    group.add_argument("--max-rate", type=float, metavar="R", help="where it ends")
    group.add_argument("--tolerance", type=float, default=0.05, metavar="X", help="of the search; default 0.05")
    names = tuple(name.replace("_", "-") for name in get_args(Kind))
    group.add_argument("--arrivals", choices=names, default=names[0], help="default: those of `vllm bench serve`")
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1 Poisson, less bursts, more is even; default 1"
    )


def _good(group: Any) -> None:
    slo_flags.add(group)
    group.add_argument("--threshold", type=float, metavar="X", help="attainment of the goodput of a --rate sweep")


def _out(group: Any) -> None:
    group.add_argument("--out", type=Path, metavar="FILE", help="the results as JSON")
    group.add_argument("--csv", type=Path, metavar="FILE", help="one line a request")
    group.add_argument("--report", type=Path, metavar="FILE", help="the results as an HTML page")
    group.add_argument("--png", type=Path, metavar="FOLDER", help="the page's figures")
    group.add_argument("--label", default="", help="a name for this measurement")
    group.add_argument("--no-progress", action="store_true", help="no live display")


def wanted(args: argparse.Namespace) -> Wanted:
    """What the flags ask for.

    Raises:
        ConfigError: a value that cannot be.
    """
    spans = (parse_span(text) if text else None for text in (args.input_len, args.output_len))
    prompt, output = spans
    if args.goodput is not None and args.threshold is not None:
        raise ConfigError(f"a search has its threshold behind --goodput: say --goodput {args.threshold:g}")
    threshold = args.goodput if args.goodput is not None else args.threshold
    return Wanted(
        scenario=args.scenario,
        prompt=prompt,
        output=output,
        dataset=args.dataset,
        trace=args.trace,
        requests=args.requests,
        seed=_not_negative("--seed", args.seed),
        content_seed=secrets.randbits(32)
        if args.content_seed is None
        else _not_negative("--content-seed", args.content_seed),
        ids=TokenRange(*args.token_ids),
        sharing=None if args.hit_rate is None else Sharing(args.hit_rate, args.prefix_groups, args.prefix_block),
        kind=args.arrivals.replace("-", "_"),
        burstiness=args.burstiness,
        rates=tuple(args.rate or ()),
        concurrency=tuple(args.concurrency or ()),
        search=None if args.goodput is None else _search(args),
        threshold=THRESHOLD if threshold is None else threshold,
        slo=slo_flags.of(args),
    )


def asking(args: argparse.Namespace) -> Asking:
    """What all requests have in common.

    Raises:
        ConfigError: the deadline is not positive.
    """
    if not 0 < args.timeout < float("inf"):
        raise ConfigError(f"--timeout {args.timeout:g}: a positive number of seconds")
    _not_negative("--give-up", args.give_up)
    _not_negative("--warmups", args.warmups)
    return Asking(args.model, args.mode, args.route, not args.no_ignore_eos, args.temperature, args.timeout)


def expected(args: argparse.Namespace) -> Expected:
    """What was said of the transport.

    Raises:
        ConfigError: something is allowed that is no fallback.
    """
    if strange := sorted(set(args.allow_transport) - FALLBACKS):
        raise ConfigError(f"--allow-transport {strange[0]}: the fallbacks are {_listed(FALLBACKS)}")
    return Expected(args.expect_transport, tuple(args.allow_transport))


def _search(args: argparse.Namespace) -> Search:
    if args.min_rate is None or args.max_rate is None:
        raise ConfigError("--goodput searches between --min-rate and --max-rate: give both")
    return Search(args.min_rate, args.max_rate, args.goodput, args.tolerance)


def _not_negative(flag: str, value: int) -> int:
    if value < 0:
        raise ConfigError(f"{flag} {value}: not below 0")
    return value


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
