"""`pdserve-proxy`: reads flags, runs the proxy until it is told to stop."""

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from pdserve.proxy.app import ProxyApp
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.metrics import span_readings
from pdserve.proxy.tracing.apart import command
from pdserve.proxy.tracing.relief import Relieved
from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime import flags
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import check_bind, load_cluster_key
from pdserve.runtime.failpoints import FAILPOINTS
from pdserve.runtime.failpoints.control import from_environment
from pdserve.runtime.lifecycle import Shutdown, serve_until_shutdown
from pdserve.runtime.log import LogFormat, LogLevel, setup
from pdserve.runtime.race import unless
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import catalogue, names, settings
from pdserve.runtime.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

EXPORT_DELAY = 0.25
"""Seconds that a drawn trace may wait for others (its record has waited child.PAUSE before): who asks for the last one
waits for both."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="pdserve-proxy", description="Front of a pdserve deployment.")
    flags.add_flags(made, ProxyConfig)
    made.add_argument("--cluster-key-file", type=Path, help="key that engines sign with")
    made.add_argument("--insecure", action="store_true", help="bind more than loopback without a key")
    made.add_argument("--log-format", choices=[form.value for form in LogFormat], default=LogFormat.AUTO.value)
    made.add_argument("--log-level", choices=[level.value for level in LogLevel], default=LogLevel.INFO.value)
    return made


@dataclass(frozen=True, slots=True)
class Log:
    """What the proxy's log looks like, its other process's too."""

    form: LogFormat = LogFormat.AUTO
    level: LogLevel = LogLevel.INFO


async def serve(config: ProxyConfig, signer: Signer, shutdown: Shutdown, lines: Log = Log()) -> None:
    """Runs a proxy until `shutdown`.

    Raises:
        PdserveError: it could not start, or a part of it died.
    """
    clock = Clock()
    async with AsyncExitStack() as stack:
        metrics = Metrics(names.PROXY, catalogue.PROXY)
        metrics.with_process()
        where = settings.endpoint(os.environ)
        traces: Relieved | None = None
        if where:  # first, since it starts beside all the rest, and last to be closed
            calm, urgent = (command(EXPORT_DELAY, lines.form, lines.level, urgent=urgent) for urgent in (False, True))
            traces = sink = await stack.enter_async_context(Relieved(calm, urgent, clock))
            metrics.read(lambda: span_readings(sink.counts))
        app = await ProxyApp.start(config, signer, clock, os.urandom, traces, metrics)
        stack.push_async_callback(app.aclose)
        at = app.addresses
        log.info("proxy_ready", grpc=at.grpc, http=at.http, registration=at.registration, traces=where)
        # What is here now stays. A full collection would look at all of it, and stop every stream meanwhile.
        gc.freeze()
        failed = app.failed() if traces is None else unless(app.failed(), traces.failed())
        await serve_until_shutdown(shutdown, failed, app.drain, config.drain_timeout)


async def _run(config: ProxyConfig, signer: Signer, lines: Log) -> None:
    shutdown = Shutdown()
    shutdown.on_signals()
    await serve(config, signer, shutdown, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a shutdown, 2 for settings that cannot work, 1 for a part that died."""
    args = parser().parse_args(argv)
    lines = Log(LogFormat(args.log_format), LogLevel(args.log_level))
    setup("proxy", lines.form, lines.level)
    try:
        from_environment(FAILPOINTS)
        config = flags.from_args(ProxyConfig, args)
        if config.trace_ratio is None:
            config = replace(config, trace_ratio=settings.ratio(os.environ))
        key = load_cluster_key(args.cluster_key_file)
        check_bind(config.host, key, insecure=args.insecure)
        asyncio.run(_run(config, Signer(key.secret), lines))
    except ConfigError as error:
        log.error("cannot_start", error=error.message)
        return 2
    except PdserveError as error:
        log.error("proxy_died", reason=error.reason, error=error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
