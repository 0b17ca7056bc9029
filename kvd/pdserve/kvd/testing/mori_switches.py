"""What the fake mori does, by name: each a thing that was seen or read of mori 1.2.4, and that a test can switch off to
see that the suite notices; and what a test can say of the machine that it runs on.

The fake lives in other processes than the test, so both go there by one environment variable (`to_env`).
"""

import enum
import os
from typing import Final

import msgspec

VARIABLE: Final = "PDSERVE_FAKE_MORI"


class Row(enum.Enum):
    """A row of the table."""

    NO_TCP = "create_backend(TCP) raises; below it the process aborts"
    NEEDS_DEVICE = "create_backend(RDMA) without a device raises"
    FALLBACK = "MORI_DISABLE_AUTO_XGMI=0, and no other value: without a device it carries on, at port 1"
    XGMI_NEEDS_GPUS = "XGMI has no session for host memory: create_session gives None"
    EXITS = "without ROCm's SMI library, or a GPU, the constructor ends the process with exit(-1)"
    HANGS = "on a virtual RDMA device the constructor never returns"
    ABORTS = "memory that cannot be registered aborts the process"
    NOTIFICATIONS_POISON = "with notifications on, transfers fail with ENOMEM under load"
    NOTIFICATIONS_STAY = "an inbound status can be popped again and again"
    OUT_OF_RANGE = "a local offset out of range is ERR_INVALID_ARGS, and the session is still good"
    REMOTE_ERROR = "a read of memory that was deregistered fails, and the queue pair is dead"
    ALIVE_LIES = "alive() is True on a dead queue pair, and create_session gives one again"
    SILENCE = "a read from a peer that is gone stays in progress, and no failure is told"
    STALE_KEY = "a peer that comes back under its old key is read through the dead queue pair"
    SPINS = "a thread uses a whole core (of the fake: a quarter of one) as long as there is an engine"
    LATE_PORT = "before there is a backend the engine's description has port 0"
    BARE_POINTER = "a status that is dropped in flight is written to all the same: the process dies"
    NO_CANCEL = "what was begun cannot be taken back"
    UNREGISTERED = "create_session raises for a peer that is not known, or memory of another size than it says"
    LAZY = "the peer is called when a session is made, not before, and answers without knowing the caller"
    ENVIRONMENT = "the environment goes before the configuration, silently"
    SQ_FULL = "a full queue is ERR_RDMA_OP, and only its words tell"
    PARTIAL = "of a batch that the device does not take whole, what it took goes on; only the failure's words tell"
    TOO_LONG = "a request of 4 GiB or more is refused"
    HOLDS_LOCK = "create_session holds the interpreter lock while it waits"
    BINDS_HOST = "the control port is bound to the address that it was given"
    REMOVES = "remove_backend returns when its threads have ended and nothing is written; what was under way stays so"
    PEER_FAILURES = "pop_peer_failure tells the one that reads of a peer that it gave up"


class Machine(msgspec.Struct, frozen=True):
    """The machine that the fake runs on."""

    devices: int = 1
    """RDMA devices."""
    virtual: bool = False
    """They are virtual ones."""
    rocm: bool = True
    """ROCm's SMI library finds a GPU."""
    registers: bool = True
    """The device takes memory."""
    foreign: bool = True
    """It takes memory of a GPU that another process has, and has given away by a handle."""
    queue: int = 8192
    """Work requests that a queue pair has room for."""
    takes: int = 1 << 31
    """Work requests of one batch that the device takes; for the others it has no memory."""
    rate: float = 0.0
    """Bytes a second of a queue pair; 0: as fast as it goes."""
    handshake: float = 0.0
    """Seconds that a peer takes to answer at its control port."""
    silent: str = ""
    """While a file of this name is there, no read comes to its end."""
    given_up: str = ""
    """While a file of this name is there, the device gives up the peers whose key it has, each once."""


class Switches(msgspec.Struct, frozen=True):
    """Everything that a test can say."""

    off: frozenset[str] = frozenset()
    """Names of rows that the fake does not do."""
    machine: Machine = Machine()

    def on(self, row: Row) -> bool:
        """Whether the fake does it."""
        return row.name not in self.off


def to_env(off: Row | None = None, machine: Machine | None = None) -> dict[str, str]:
    """This process's environment, in which the fake is like this."""
    switches = Switches(frozenset() if off is None else frozenset({off.name}), machine or Machine())
    return {**os.environ, VARIABLE: msgspec.json.encode(switches).decode()}


def from_env() -> Switches:
    """What this process was told."""
    return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Switches)
