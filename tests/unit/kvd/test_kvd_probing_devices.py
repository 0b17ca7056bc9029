"""Network and RDMA devices as a kernel shows them, from a made-up /sys/class."""

from pathlib import Path

from pdserve.kvd.probing.devices import read_devices
from pdserve.kvd.probing.values import Device


def put(root: Path, path: str, text: str) -> None:
    """One file."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def test_rates_are_taken_from_devices_alone(tmp_path: Path) -> None:
    """A veth pair says 10 Gbit/s and means nothing by it; -1 is a device that does not know; loopback is no device."""
    for name, speed in (("eth0", "25000"), ("eth1", "-1"), ("veth0", "10000"), ("lo", "0")):
        put(tmp_path, f"net/{name}/speed", speed)
        put(tmp_path, f"net/{name}/operstate", "down" if name == "eth1" else "up")
    for name in ("eth0", "eth1"):
        (tmp_path / f"net/{name}/device").mkdir()
    assert read_devices(tmp_path) == (
        Device("eth0", "net", 25 * 10**9, True),
        Device("eth1", "net", 0, False),
        Device("veth0", "net", 0, True),
    )


def test_each_port_of_an_rdma_device(tmp_path: Path) -> None:
    """By the name that UCX has for it, with its rate and whether its link is up."""
    for port, rate, state in (("1", "100 Gb/sec (4X EDR)", "4: ACTIVE"), ("2", "2.5 Gb/sec (1X SDR)", "1: DOWN")):
        put(tmp_path, f"infiniband/mlx5_0/ports/{port}/rate", rate)
        put(tmp_path, f"infiniband/mlx5_0/ports/{port}/state", state)
    put(tmp_path, "infiniband/odd/ports/1/rate", "fast")
    assert read_devices(tmp_path) == (
        Device("mlx5_0:1", "rdma", 100 * 10**9, True),
        Device("mlx5_0:2", "rdma", 2_500_000_000, False),
        Device("odd:1", "rdma", 0, False),
    )


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    """As in a container without /sys."""
    assert read_devices(tmp_path / "none") == ()
