"""GET /metrics: the answer, and a small HTTP server for services that have no other one."""

from aiohttp import web

from pdserve.runtime.config import MetricsConfig, join_address
from pdserve.runtime.listening import HttpPort
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
        self._port = HttpPort(app)

    async def start(self, config: MetricsConfig) -> str:
        """Binds and serves; returns the `host:port`.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        port = await self._port.start(config.host, config.port or 0, called="the metrics port")
        return join_address(config.host, port)

    async def aclose(self) -> None:
        """Stops; safe twice."""
        await self._port.aclose()

    async def _answer(self, _: web.Request) -> web.Response:
        return answer(self._metrics)
