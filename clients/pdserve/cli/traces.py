"""`pdserve traces`: a trace store on this machine, in the foreground, until Ctrl-C."""

import argparse
import os
import sys
from pathlib import Path

from pdserve.cli import extras, options

OTLP_PORT, PORT = 4317, 16686
"""Where Jaeger listens too: what is set up for one finds the other."""
TAKES_REST = True


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where it listens and what it keeps the traces in."""
    parser.epilog = "What follows `--` goes to pdserve-traces: `pdserve-traces --help` lists all of its flags."
    parser.add_argument("--otlp-port", type=options.times, default=OTLP_PORT, metavar="P", help="default 4317")
    parser.add_argument("--port", type=options.times, default=PORT, metavar="P", help="HTTP; default 16686")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the store; default: one of this user's")


def run(args: argparse.Namespace) -> int:
    """Becomes the trace store; does not return.

    Raises:
        ConfigError: what it needs is not installed.
    """
    extras.check("traces", "node", extras.NODE)
    sys.stdout.flush()
    os.execv(sys.executable, command(args))


def command(args: argparse.Namespace) -> list[str]:
    """The command line of the service."""
    made = [sys.executable, "-m", "pdserve.traces", "--otlp-port", str(args.otlp_port), "--port", str(args.port)]
    return [*made, *(("--file", str(args.file)) if args.file else ()), *args.rest]
