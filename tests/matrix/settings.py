"""What the fleet of the matrix is, and the seconds that its claims are made of.

Deadlines are short, so that what only a deadline frees is seen to be freed within a case. They keep
their order: beat < lease < eviction < stop < answer. A lease is renewed three times within its length:
two busy cores may keep a process waiting for longer than the two thirds of it that are left.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.engine.sim import SimConfig

LEASE_S: Final = 0.5
"""A producer's; one TTL."""
FENCE_S: Final = 0.5
"""After which the session of an operation that does not end is torn down."""
PATIENCE_S: Final = 0.9
"""kvd's accept, transfer and park deadlines."""
GRACE_S: Final = 0.5
"""What kvd gives a lost stream, and the proxy a decode engine whose producer is gone."""
BEAT_S: Final = 0.04
"""Of the engines; the proxy expects them less often, so that one that is late on a busy box is not suspected."""
BEAT_EXPECTED_S: Final = 0.2
BEATS_MISSED: Final = 3
"""An engine is evicted after 0.7 s."""
HOLD_S: Final = 0.2
"""The proxy's, for a request without engines: there are always others here but in the first moment of a new proxy."""
STOPPED_S: Final = 2 * LEASE_S
"""How long a stopped process stands still: two TTLs."""
ANSWER_S: Final = 6.0
"""Within which every request has its one answer."""
SLACK_S: Final = 0.7
"""Of what ends with a deadline: the beat that tells the proxy, and two busy cores."""

SIM: Final = SimConfig(layers=4, ranks=2, num_blocks=64, token_budget=64)
PROMPT: Final = 150
"""Tokens of a prompt: three chunks, ten blocks, the last one partly filled."""
ANSWER: Final = 8
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One member of the fleet: what is started, and started again, under its name."""

    name: str
    program: str
    argv: tuple[str, ...]
    ready: str
    """Name of the log event that says it serves."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Fixed for the life of a fleet: who comes back comes back to the same place."""

    folder: Path
    proxy: str
    specs: Mapping[str, Spec]

    @property
    def kvd(self) -> Path:
        """kvd's gRPC socket."""
        return self.folder / "kvd" / "kvd.sock"

    def failpoints(self, name: str) -> Path:
        """A member's control socket."""
        return self.folder / f"{name}.fail"

    def log(self, name: str) -> Path:
        """A member's log, of all its lives."""
        return self.folder / f"{name}.log"


def addresses(folder: Path) -> Addresses:
    """A fleet of kvd, proxy, two prefill and two decode services in a folder."""
    grpc, http, ping, *engines = _free_ports(7)
    state = folder / "kvd"
    state.mkdir()
    specs = [
        Spec("kvd", "kvd", _kvd(state), "kvd_ready"),
        Spec("proxy", "proxy", _proxy(grpc, http, ping), "proxy_ready"),
    ]
    for name, port in zip(("prefill-0", "prefill-1", "decode-0", "decode-1"), engines, strict=True):
        program = name.partition("-")[0]
        specs.append(Spec(name, program, _engine(program, port, state / "kvd.sock", ping), "serving"))
    return Addresses(folder, f"127.0.0.1:{grpc}", {spec.name: spec for spec in specs})


def _kvd(state: Path) -> tuple[str, ...]:
    patience = (f"--{name}={PATIENCE_S}" for name in ("accept", "transfer", "park"))
    return (
        f"--state-dir={state}", "--transport=sim", "--sim-bandwidth=50e9", f"--lease={LEASE_S}", f"--fence={FENCE_S}",
        f"--tie={PATIENCE_S}", f"--grace={GRACE_S}", "--drain=1", "--log-format=json", *patience,
    )  # fmt: skip


def _proxy(grpc: int, http: int, ping: int) -> tuple[str, ...]:
    return (
        f"--grpc-port={grpc}", f"--http-port={http}", f"--ping-port={ping}", f"--beat-interval={BEAT_EXPECTED_S}",
        f"--beats-missed={BEATS_MISSED}", "--admission-timeout=3", f"--hold-timeout={HOLD_S}",
        f"--handover-grace={GRACE_S}", "--release-timeout=4", "--drain-timeout=1", "--log-format=json",
    )  # fmt: skip


def _engine(program: str, port: int, socket: Path, ping: int) -> tuple[str, ...]:
    own = {
        "prefill": ("--compute-seconds=5", "--release-seconds=5"),
        "decode": ("--transfer-seconds=5", "--settle-seconds=1"),
    }
    return (
        "--engine=sim", f"--kvd-socket={socket}", "--kvd-seconds=5", f"--port={port}", f"--proxy=127.0.0.1:{ping}",
        f"--beat-seconds={BEAT_S}", "--drain-seconds=1", "--log-format=json", f"--sim-layers={SIM.layers}",
        f"--sim-ranks={SIM.ranks}", f"--sim-num-blocks={SIM.num_blocks}", f"--sim-token-budget={SIM.token_budget}",
        "--sim-fence-timeout=2", *own[program],
    )  # fmt: skip


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different, and given to nobody else of this process."""
    found: list[int] = []
    for port in _PORTS:
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} ports are free")


def _ports() -> Iterator[int]:
    """Below those that the kernel gives to connections, one of which could take the port of a member while it is away.
    Where they begin differs from process to process: two fleets are not in each other's way."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    span = range(10_000, kernels if kernels > 15_000 else 60_000)
    start = os.getpid() * 101 % len(span)
    yield from (*span[start:], *span[:start])


_PORTS: Final = _ports()
