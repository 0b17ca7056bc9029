"""`pdserve-proxy`: reads flags, runs the proxy until it is told to stop."""

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pdserve.proxy.app import ProxyApp
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.metrics import span_readings
from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime import flags
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import check_bind, load_cluster_key
from pdserve.runtime.failpoints import FAILPOINTS
from pdserve.runtime.failpoints.control import from_environment
from pdserve.runtime.lifecycle import Shutdown, serve_until_shutdown
from pdserve.runtime.log import LogFormat, LogLevel, setup
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import catalogue, names, settings
from pdserve.runtime.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from pdserve.runtime.telemetry.export import OtlpExport

log = structlog.get_logger(__name__)

EXPORT_DELAY = 0.25
"""Seconds that a drawn trace may wait for others (its record has waited sink.PAUSE before): who asks for the last one
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


async def serve(config: ProxyConfig, signer: Signer, shutdown: Shutdown) -> None:
    """Runs a proxy until `shutdown`.

    Raises:
        PdserveError: it could not start, or a part of it died.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics(names.PROXY, catalogue.PROXY)
        metrics.with_process()
        traces = exporter(os.environ)
        if traces is not None:
            stack.push_async_callback(traces.aclose)
            metrics.read(lambda: span_readings(traces.counts))
        send = traces.send if traces is not None else None
        app = await ProxyApp.start(config, signer, Clock(), os.urandom, send, metrics)
        stack.push_async_callback(app.aclose)
        where = app.addresses
        log.info(
            "proxy_ready",
            grpc=where.grpc,
            http=where.http,
            registration=where.registration,
            traces=settings.endpoint(os.environ),
        )
        # What is here now stays. A full collection would look at all of it, and stop every stream meanwhile.
        gc.freeze()
        await serve_until_shutdown(shutdown, app.failed(), app.drain, config.drain_timeout)


def exporter(environ: Mapping[str, str]) -> "OtlpExport | None":
    """What sends traces to where OpenTelemetry's variables say; None where they say nowhere.

    Raises:
        ConfigError: they make no sense.
    """
    where = settings.endpoint(environ)
    if not where:
        return None
    # Half a second of imports that only traces need.
    from pdserve.runtime.telemetry.export import ExportSettings, OtlpExport

    try:
        return OtlpExport(where, ExportSettings(delay=EXPORT_DELAY))
    except ValueError as error:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_...: {error}") from error


async def _run(config: ProxyConfig, signer: Signer) -> None:
    shutdown = Shutdown()
    shutdown.on_signals()
    await serve(config, signer, shutdown)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a shutdown, 2 for settings that cannot work, 1 for a part that died."""
    args = parser().parse_args(argv)
    setup("proxy", LogFormat(args.log_format), LogLevel(args.log_level))
    try:
        from_environment(FAILPOINTS)
        config = flags.from_args(ProxyConfig, args)
        if config.trace_ratio is None:
            config = replace(config, trace_ratio=settings.ratio(os.environ))
        key = load_cluster_key(args.cluster_key_file)
        check_bind(config.host, key, insecure=args.insecure)
        asyncio.run(_run(config, Signer(key.secret)))
    except ConfigError as error:
        log.error("cannot_start", error=error.message)
        return 2
    except PdserveError as error:
        log.error("proxy_died", reason=error.reason, error=error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
