"""The process that has device memory for a measurement: `python -m pdserve.kvd.probing.device_worker`.

Its own process, since no process can open by a handle what it has allocated itself; and what it holds of a device, its
context too, is free again when it has ended.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from pdserve.kvd.probing import device_wire as asked
from pdserve.kvd.probing.scratch import PAGE, pattern
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.child_worker import Channel, live
from pdserve.kvd.types import DeviceMemory, MemoryKind
from pdserve.rpc.errors import TransferFailed

_WRITE_BYTES: Final = 4 << 20


class Owns(Protocol):
    """What the process needs of devices; `own_devices(kind)` of the module that has it makes one. All raise
    TransferFailed."""

    def buses(self) -> Sequence[str]:
        """PCI bus ids of the devices that this process sees, by number."""
        ...

    def make(self, bus_id: str, nbytes: int) -> DeviceMemory:
        """Memory in one piece, where enough is free."""
        ...

    def write(self, memory: DeviceMemory, offset: int, data: bytes) -> None:
        """Returns when it is there."""
        ...

    def read(self, memory: DeviceMemory, offset: int, nbytes: int) -> bytes:
        """What is there."""
        ...


def work(kvd: Channel, args: Sequence[str]) -> None:
    """`NAME MODULE KIND`: answers until kvd is gone."""
    _, module, kind = args
    try:
        owns: Owns = importlib.import_module(module).own_devices(MemoryKind(kind))
        buses = tuple(owns.buses())
    except TransferFailed as error:
        kvd.say(wire.Answer(0, error=error.message))
        return
    made: dict[str, DeviceMemory] = {}
    kvd.say(wire.Answer(0, asked.encode(buses)))
    while kvd.open:
        for message in kvd.hear(None):
            if isinstance(message, wire.Call):
                kvd.say(_answer(owns, made, message))


def _answer(owns: Owns, made: dict[str, DeviceMemory], call: wire.Call) -> wire.Answer:
    try:
        match asked.decode_asked(call.what):
            case asked.Make(name, bus_id, nbytes, seed):
                made[name] = owns.make(bus_id, nbytes)
                for at in range(0, nbytes, _WRITE_BYTES):
                    part = min(_WRITE_BYTES, nbytes - at)
                    filled = bytes(part) if seed is None else pattern(seed, at // PAGE, part // PAGE).tobytes()
                    owns.write(made[name], at, filled)
                return wire.Answer(call.call_id, asked.encode(made[name]))
            case asked.Look(name, offsets):
                words = [owns.read(made[name], at, 8) for at in offsets]
                numbers = tuple(int.from_bytes(word, sys.byteorder) for word in words)
                return wire.Answer(call.call_id, asked.encode(numbers))
    except TransferFailed as error:
        return wire.Answer(call.call_id, error=error.message or type(error).__name__)


if __name__ == "__main__":
    sys.exit(live(sys.argv[1:], work))
