"""The one entry of the `pdserve` command: finds the sub-command, loads only that, runs it.

A sub-command is a module with `arguments(parser)` and `run(args) -> exit status`. grpc is imported
inside `run`, so that `--help` and a mistyped flag answer at once. A module with TAKES_REST gets what
follows `--` as `args.rest`.
"""

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from pdserve.rpc.errors import PdserveError

COMMANDS = {
    "up": ("pdserve.cli.up", "start a deployment on this machine and keep it running"),
    "generate": ("pdserve.cli.generate", "answer one prompt"),
    "chat": ("pdserve.cli.chat", "talk to a model"),
    "status": ("pdserve.cli.status", "show the engines behind a proxy"),
    "trace": ("pdserve.cli.trace", "show where a request's time to first token went"),
    "traces": ("pdserve.cli.traces", "keep the traces of a deployment, for `pdserve trace`, a browser and Jaeger"),
    "kvd": ("pdserve.cli.kvd", "show what a node's kvd holds, drain it, and measure what carries KV (kvd doctor)"),
    "bench": ("pdserve.bench.command", "offer a load and say how many requests met their objectives"),
    "profile": ("pdserve.planner.profile_command", "measure a running deployment, for `pdserve plan`"),
    "plan": ("pdserve.planner.plan_command", "say whether and how to split a number of engines, for a workload"),
    "demo": ("pdserve.cli.demo", "show that a split answer is the one a single engine gives"),
    "doctor": ("pdserve.cli.doctor", "say whether this host can run a deployment, and what to do where it cannot"),
    "model": ("pdserve.cli.model", "fetch a small model to try things with"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Returns:
        0; 1 for a typed error, said in one sentence on stderr; 2 for a wrong command line; 130 for Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="pdserve", description="Prefill/decode split LLM serving.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("pdserve"))
    listing = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in words if not word.startswith("-")), "")
    modules: dict[str, ModuleType] = {}
    for name, (path, help_) in COMMANDS.items():
        sub = listing.add_parser(name, help=help_, description=help_.capitalize() + ".", allow_abbrev=False)
        if name == wanted:
            modules[name] = importlib.import_module(path)
            modules[name].arguments(sub)
    rest: list[str] = []
    if "--" in words and getattr(modules.get(wanted), "TAKES_REST", False):
        cut = words.index("--")
        words, rest = words[:cut], words[cut + 1 :]
    args = parser.parse_args(words)
    args.rest = rest
    try:
        status: int = modules[args.command].run(args)
    except PdserveError as error:
        first, *more = error.message.splitlines() or [""]  # a log's end may follow the sentence
        notes = getattr(error, "__notes__", ())
        print("\n".join([f"pdserve: {first} ({error.reason})", *more, *notes]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone; keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
