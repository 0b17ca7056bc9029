"""One service of a fleet with its simulated engine, as the tests see it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.engine.hosting.program import Parts
from pdserve.engine.port import Output, Request
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.runtime.lifecycle import Shutdown
from pdserve.runtime.testing import Gate


@dataclass(eq=False)
class Service:
    """One hosted engine."""

    engine: SimEngine
    parts: Parts
    steps: Gate
    """Passed once a step, or once a layer in a step whose layers are told to kvd."""
    shutdown: Shutdown
    task: asyncio.Task[None]
    role: str
    gone: bool = False
    """It did not end in order."""

    @property
    def engine_id(self) -> str:
        """Fresh at every start."""
        return self.engine.info.engine_id


def posing(config: SimConfig, identity: Mapping[str, str]) -> SimConfig:
    """The same engine under another identity."""

    class Posing(SimConfig):
        def identity(self) -> dict[str, str]:
            return SimConfig.identity(self) | dict(identity)

    return Posing(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


async def outputs(engine: SimEngine, request: Request) -> list[Output]:
    """All that an engine says to one request."""
    async with contextlib.aclosing(engine.generate(request)) as stream:
        return [output async for output in stream]
