"""What kvd needs of an accelerator, so that all but the accelerator can be tested without one.

Contracts:
- Every call but `Event.done` and `Device.launch` may block, and comes from the one thread that a device has; `launch`
  comes from there too, or from the event loop while that thread does nothing.
- A launch that was given is done, or has failed, when `Launch.wait` returns or raises.
"""

from typing import Protocol

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.parts import Place
from pdserve.kvd.types import MemoryKind


class DeviceFailed(Exception):
    """A call of the accelerator's runtime failed; the message has its words."""


class Event(Protocol):
    """A mark in the work of another process on its device."""

    def done(self) -> bool:
        """Whether the device is past the mark as it was last set; never blocks.

        Raises:
            DeviceFailed: it can no longer be known.
        """
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


class Launch(Protocol):
    """One piece of work given to a device."""

    def wait(self) -> None:
        """Returns when it is done.

        Raises:
            DeviceFailed: it failed; the device does nothing more of it.
        """
        ...


class Device(Protocol):
    """One accelerator."""

    @property
    def bus_id(self) -> str:
        """Its PCI bus id."""
        ...

    def open(self, handle: bytes) -> tuple[int, int]:
        """Maps an allocation of another process, once at a time; its address here and its bytes.

        Raises:
            DeviceFailed: the handle is of no allocation that this device can reach.
        """
        ...

    def close(self, address: int) -> None:
        """Unmaps it. Raises DeviceFailed where that fails."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Raises DeviceFailed where the handle is of no event."""
        ...

    def warm_up(self, place: Place) -> None:
        """Does what makes a first copy from or to a place slow. Raises DeviceFailed where it cannot copy at all."""
        ...

    def launch(self, runs: Runs, src: Place, dst: Place) -> Launch:
        """Begins to copy runs that lie in the two places, behind what was launched before.

        Raises:
            DeviceFailed: nothing of it was begun.
        """
        ...


class Devices(Protocol):
    """The accelerators that this process sees."""

    @property
    def kind(self) -> MemoryKind:
        """Of their memory."""
        ...

    def find(self, bus_id: str) -> Device:
        """The same device each time.

        Raises:
            DeviceFailed: this process does not see it.
        """
        ...
