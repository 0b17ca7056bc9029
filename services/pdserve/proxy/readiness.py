"""gRPC's health in step with whether a request could be placed: what probes and load balancers ask."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from pdserve.rpc.errors import PdserveError

log = structlog.get_logger(__name__)


class Readiness:
    """Tells of each change. `changed` is to be called whenever the answer may be another one."""

    def __init__(self, check: Callable[[], object], tell: Callable[[bool], Awaitable[None]]) -> None:
        """`check`: raises PdserveError while no request could be placed, and says why; `tell`: takes the answer."""
        self._check = check
        self._tell = tell
        self._told: bool | None = None
        self._again = asyncio.Event()
        self._one = asyncio.Lock()

    def changed(self) -> None:
        """Has it looked at soon; does not block."""
        self._again.set()

    async def update(self) -> None:
        """Looks now, and returns once what there is has been told."""
        async with self._one:  # or an older answer could be told after a newer one
            why = ""
            try:
                self._check()
            except PdserveError as error:
                why = f"{error.reason}: {error.message}"
            if (ready := not why) is not self._told:
                self._told = ready
                await self._tell(ready)
                log.info("ready" if ready else "not_ready", why=why)

    async def run(self) -> None:
        """Follows the changes until it is cancelled."""
        while True:
            await self._again.wait()
            self._again.clear()
            await self.update()
