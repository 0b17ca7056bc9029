"""A daemon's serving half as a process: prints its mori process's id and the card of a region of sevens, then, at each
line of input, whether that process sleeps."""

import asyncio
import sys

from pdserve.kvd.config import MoriConfig
from pdserve.kvd.testing.mori import FAKE, to_env
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mori import MoriTransport
from tests.contract.kvd.far_rig import region


async def main(size: int, idle: float) -> None:
    """Until its input ends."""
    arena = Arena([1 << 32])
    far = region(arena, "far", 7, size)
    transport = MoriTransport(arena, MoriConfig(idle=idle), FAKE, to_env())
    card = await transport.card(far)
    print(transport.processes()[0].pid, card.hex(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(transport.processes()[0].asleep, flush=True)
    await transport.aclose()


asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
