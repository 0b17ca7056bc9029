"""`pdserve generate`: one prompt, its answer on stdout as it comes."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from pdserve.cli import options
from pdserve.rpc.errors import EmptyPrompt


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the prompt and the call's options."""
    parser.add_argument("prompt", nargs="?", default="-", help="`-` or nothing: read from stdin")
    parser.add_argument("--json", action="store_true", help="print the whole answer with its facts as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="do not print the line of facts on stderr")
    options.add_target(parser)
    options.add_call(parser)


def run(args: argparse.Namespace) -> int:
    """Streams the answer to stdout and its facts to stderr."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise EmptyPrompt("the prompt has no character")
    target = options.target(args)
    from pdserve.cli import text
    from pdserve.client import Client

    with Client(target) as client, client.stream(prompt, **options.call_fields(args)) as stream:
        if not args.json:
            for delta in stream:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
        done = stream.completion()
    if args.json:
        print(json.dumps(dataclasses.asdict(_plain(done)), indent=2, ensure_ascii=False))
    elif not args.quiet:
        print(text.summary(done), file=sys.stderr)
    return 0


def _plain(done: Any) -> Any:
    """The same completion with a dict for the mapping that `asdict` cannot copy."""
    return dataclasses.replace(done, timings=dataclasses.replace(done.timings, parts=dict(done.timings.parts)))
