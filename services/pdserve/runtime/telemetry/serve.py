"""GET /metrics: the answer, and a small HTTP server for services that have no other one."""

from aiohttp import web

from pdserve.rpc.errors import ConfigError
from pdserve.runtime.config import MetricsConfig, join_address
from pdserve.runtime.telemetry.metrics import CONTENT_TYPE, Metrics

PATH = "/metrics"


def answer(metrics: Metrics) -> web.Response:
    """The metrics as they are now."""
    return web.Response(body=metrics.expose(), headers={"Content-Type": CONTENT_TYPE})


class MetricsServer:
    """Serves until it is closed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, config: MetricsConfig) -> str:
        """Binds and serves; returns the `host:port`.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host.strip("[]"), config.port or 0).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot bind the metrics port {config.host}:{config.port}: {error.strerror}") from error
        return join_address(config.host, int(self._runner.addresses[0][1]))

    async def aclose(self) -> None:
        """Stops; safe twice."""
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return answer(self._metrics)
