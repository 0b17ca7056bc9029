"""`pdserve-proxy`: reads flags, runs the proxy until it is told to stop."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from pdserve.proxy.app import ProxyApp
from pdserve.proxy.config import ProxyConfig
from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime import flags
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import check_bind, load_cluster_key
from pdserve.runtime.failpoints import FAILPOINTS
from pdserve.runtime.failpoints.control import from_environment
from pdserve.runtime.lifecycle import Shutdown, serve_until_shutdown
from pdserve.runtime.log import LogFormat, LogLevel, setup
from pdserve.runtime.signing import Signer

log = structlog.get_logger(__name__)


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
    app = await ProxyApp.start(config, signer, Clock(), os.urandom)
    try:
        where = app.addresses
        log.info("proxy_ready", grpc=where.grpc, http=where.http, registration=where.registration)
        await serve_until_shutdown(shutdown, app.failed(), app.drain, config.drain_timeout)
    finally:
        await app.aclose()


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
