"""`pdserve generate`: one prompt, its answer on stdout as it comes."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pdserve.cli import options
from pdserve.rpc.errors import EmptyPrompt, PdserveError

if TYPE_CHECKING:
    from pdserve.client import Delta


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the prompt and the call's options."""
    parser.add_argument("prompt", nargs="?", default="-", help="`-` or nothing: read from stdin")
    parser.add_argument("--json", action="store_true", help="print the whole answer with its facts as one JSON object")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="on stderr, do not print the line of facts, why it is asked again, or the id of a request that failed",
    )
    options.add_target(parser)
    options.add_call(parser)


def run(args: argparse.Namespace) -> int:
    """Streams the answer to stdout and its facts to stderr."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise EmptyPrompt("the prompt has no character")
    opened = options.client(args, quiet=args.quiet)
    from pdserve.cli import text

    with opened as client, client.stream(prompt, **options.call_fields(args)) as stream:
        try:
            if not args.json:
                _print(stream)
            done = stream.completion()
        except PdserveError as error:
            if stream.request_id and not args.quiet:  # else the proxy had not taken it
                error.add_note(f"request {stream.request_id}: see pdserve trace {stream.request_id}")
            raise
    if args.json:
        print(json.dumps(dataclasses.asdict(_plain(done)), indent=2, ensure_ascii=False))
    elif not args.quiet:
        print(text.summary(done), file=sys.stderr)
    return 0


def _print(deltas: "Iterable[Delta]") -> None:
    begun = False
    try:
        for delta in deltas:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            begun = begun or bool(delta.text)
    except (PdserveError, KeyboardInterrupt):
        # A file gets the text as it came; on a terminal what is said next needs its own line.
        if begun and sys.stdout.isatty():
            print(flush=True)
        raise
    sys.stdout.write("\n")


def _plain(done: Any) -> Any:
    """The same completion with a dict for the mapping that `asdict` cannot copy."""
    return dataclasses.replace(done, timings=dataclasses.replace(done.timings, parts=dict(done.timings.parts)))
