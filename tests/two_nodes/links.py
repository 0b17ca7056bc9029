"""What happens to the link of the daemons, and what came over it."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.two_nodes.conftest import DEVICE, A, B, inside

LOSS = ("-i", DEVICE, "-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP")


def received() -> int:
    """Bytes that have come to decode's node over the daemons' link."""
    return int(inside(B, "cat", f"/sys/class/net/{DEVICE}/statistics/rx_bytes").stdout)


def connections() -> list[tuple[str, str]]:
    """The TCP connections of decode's node over the daemons' link: its own end, and the other."""
    listed = inside(B, "ss", "-Htn", "state", "established", "src", "10.77.1.0/24").stdout.decode()
    listed = listed.replace("[::ffff:", "").replace("]", "")  # gRPC's sockets are of IPv6
    return [(ours, theirs) for _, _, ours, theirs, *_ in (line.split() for line in listed.splitlines())]


@contextlib.contextmanager
def impaired(*command: str, undo: tuple[str, ...]) -> Iterator[None]:
    """The link of both nodes with a command's effect; skips where the kernel lacks it."""
    for node in (A, B):
        done = inside(node, *command)
        if done.returncode:
            inside(A, *undo)
            pytest.skip(f"{command[0]}: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        for node in (A, B):
            inside(node, *undo)


@contextlib.contextmanager
def lossy() -> Iterator[None]:
    """One packet of twenty is lost, each way."""
    with impaired("iptables", "-A", "INPUT", *LOSS, undo=("iptables", "-D", "INPUT", *LOSS)):
        yield


@contextlib.contextmanager
def slow(rate: str) -> Iterator[None]:
    """The link carries so much each way, as "256kbit"; what would wait for more than 400 ms is lost."""
    queue = ("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "8kb", "latency", "400ms")
    with impaired(*queue, undo=("tc", "qdisc", "del", "dev", DEVICE, "root")):
        yield
