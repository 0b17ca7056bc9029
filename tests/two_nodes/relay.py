"""A slow piece of the way, inside a namespace: `python relay.py HOST PORT TARGET DELAY`, until it is killed."""

import asyncio
import sys

from pdserve.kvd.testing import Wire


async def main(host: str, port: int, target: int, delay: float) -> None:
    """Passes what comes to HOST:PORT on to HOST:TARGET, and back, DELAY seconds later."""
    async with Wire(target, delay, host, port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    where, at, to, seconds = sys.argv[1:]
    asyncio.run(main(where, int(at), int(to), float(seconds)))
