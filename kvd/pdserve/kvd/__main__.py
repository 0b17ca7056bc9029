"""`pdserve-kvd`: runs the daemon until SIGTERM or SIGINT; the first drains, the second stops."""

import argparse
import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from pdserve.kvd.config import KvdConfig
from pdserve.kvd.limits import Limits
from pdserve.kvd.node import Node
from pdserve.kvd.server import serving
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.config import load_cluster_key
from pdserve.runtime.failpoints import FAILPOINTS
from pdserve.runtime.failpoints.control import from_environment
from pdserve.runtime.flags import add_flags, from_args
from pdserve.runtime.lifecycle import Shutdown, Tasks, serve_until_shutdown
from pdserve.runtime.log import LogFormat, LogLevel, setup

log = structlog.get_logger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""How long the copy thread may keep the event loop waiting for the interpreter lock."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The process around the daemon."""

    cluster_key_file: Path | None = None
    """File of the cluster key; PDSERVE_CLUSTER_KEY_FILE says it too."""
    log_format: LogFormat = LogFormat.AUTO
    """Console lines, JSON lines, or what fits where the log goes."""
    log_level: LogLevel = LogLevel.INFO
    """Least severe event that is written."""


def parse(argv: Sequence[str]) -> tuple[KvdConfig, Surroundings]:
    """The configuration of a command line.

    Raises:
        ConfigError: a value that cannot work, or a key file that cannot be read.
    """
    parser = argparse.ArgumentParser(prog="pdserve-kvd", description="The daemon of a node that moves KV blocks.")
    add_flags(parser, KvdConfig, skip=("limits", "cluster_key"))
    add_flags(parser, Limits)
    add_flags(parser, Surroundings)
    args = parser.parse_args(argv)
    around = from_args(Surroundings, args)
    key = load_cluster_key(around.cluster_key_file)
    return from_args(KvdConfig, args, limits=from_args(Limits, args), cluster_key=key), around


async def run(config: KvdConfig) -> None:
    """Serves until told to stop.

    Raises:
        ConfigError: it cannot start.
    """
    shutdown = Shutdown()
    shutdown.on_signals()
    async with serving(config) as node, Tasks() as tasks:
        gc.freeze()  # what is here now stays: a full collection that looks at it stops the loop for 20 ms and more
        await serve_until_shutdown(shutdown, tasks.failed(), lambda: _drain(node, config.drain), config.drain)
    log.info("kvd_stopped")


async def _drain(node: Node, seconds: float) -> None:
    await node.drained(seconds, stopping=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 2 where the daemon cannot start."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        config, around = parse(sys.argv[1:] if argv is None else argv)
        setup("kvd", around.log_format, around.log_level)
        from_environment(FAILPOINTS)
        asyncio.run(run(config))
    except ConfigError as error:
        print(f"pdserve-kvd: {error.message}", file=sys.stderr)  # noqa: T201  # the log is not set up yet
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
