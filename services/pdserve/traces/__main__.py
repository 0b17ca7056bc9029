"""`pdserve-traces`: reads flags, keeps traces until it is told to stop."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import structlog

from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime import flags
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import INSECURE_KEY, ClusterKey, check_bind
from pdserve.runtime.lifecycle import Shutdown, serve_until_shutdown
from pdserve.runtime.log import LogFormat, LogLevel, setup
from pdserve.traces.app import TracesApp
from pdserve.traces.config import TracesConfig

log = structlog.get_logger(__name__)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="pdserve-traces", description="Trace store of a pdserve deployment.")
    flags.add_flags(made, TracesConfig)
    made.add_argument("--insecure", action="store_true", help="bind more than loopback: anybody may read and write")
    made.add_argument("--log-format", choices=[form.value for form in LogFormat], default=LogFormat.AUTO.value)
    made.add_argument("--log-level", choices=[level.value for level in LogLevel], default=LogLevel.INFO.value)
    return made


async def _run(config: TracesConfig) -> None:
    shutdown = Shutdown()
    shutdown.on_signals()
    app = await TracesApp.start(config, Clock())
    try:
        log.info("traces_ready", otlp=app.addresses.otlp, http=f"http://{app.addresses.http}", file=str(config.path))
        await serve_until_shutdown(shutdown, app.failed(), app.drain, config.drain_timeout)
    finally:
        await app.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a shutdown, 2 for settings that cannot work, 1 for a part that died."""
    args = parser().parse_args(argv)
    setup("traces", LogFormat(args.log_format), LogLevel(args.log_level))
    try:
        config = flags.from_args(TracesConfig, args)
        # No key is asked for on either port, so none makes opening them safe.
        check_bind(config.host, ClusterKey(INSECURE_KEY, given=False), insecure=args.insecure)
        asyncio.run(_run(config))
    except ConfigError as error:
        log.error("cannot_start", error=error.message)
        return 2
    except PdserveError as error:
        log.error("traces_died", reason=error.reason, error=error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
