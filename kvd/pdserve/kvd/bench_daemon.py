"""A running daemon seen from outside: its own count of what it did, and what it takes of the machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.rpc.channel import aio_channel

_ASK_S = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Books:
    """What kvd says of itself."""

    landed: int
    """Consumers' ends."""
    released: int
    """Producers' ends."""
    other_ends: int
    """Ended for any reason, both sides."""
    open_ends: int
    blocks_held: int
    """Blocks that are not free."""
    defects: int


async def books(socket: str) -> Books:
    """Asks the daemon.

    Raises:
        grpc.aio.AioRpcError: it does not answer.
    """
    async with aio_channel(f"unix:{socket}") as channel:
        said = await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=_ASK_S)
    counts = dict(said.transfers)
    defects = counts.pop("defects", 0)
    landed, released = counts.pop("ended.landed", 0), counts.pop("ended.released", 0)
    ended = sum(count for name, count in counts.items() if name.startswith("ended."))
    return Books(
        landed,
        released,
        ended,
        open_ends=sum(counts.values()) - ended,
        blocks_held=sum(region.num_blocks - region.free for region in said.regions),
        defects=defects,
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process takes."""

    memory: int
    """Resident bytes that are its own: without shared memory, which is the engines'."""
    cpu: float
    """Seconds of CPU since its start."""


def usage(pid: int) -> Usage:
    """Reads /proc.

    Raises:
        OSError: there is no such process.
    """
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, shared = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "RssShmem"))
    # The command's name, in parentheses, may hold anything; utime and stime are 11 and 12 after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Usage(resident - shared, (int(fields[11]) + int(fields[12])) / _TICKS)
