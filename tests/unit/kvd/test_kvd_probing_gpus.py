"""GPUs and the XGMI links between them as a kernel shows them, from a made-up root."""

from pathlib import Path

from pdserve.kvd.probing.gpus import read_gpus
from pdserve.kvd.probing.values import Device, Gpus

NODES = "sys/class/kfd/kfd/topology/nodes"
G0, G1, G2 = "0000:1b:00.0", "0001:2c:00.1", "0000:3d:00.0"


def put(root: Path, path: str, text: str) -> None:
    """One file."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def node(root: Path, number: int, gpu_id: int, location: int, domain: int = 0) -> None:
    """One of the topology; a processor has no `gpu_id`."""
    put(root, f"{NODES}/{number}/gpu_id", str(gpu_id))
    put(root, f"{NODES}/{number}/properties", f"cpu_cores_count 0\nlocation_id {location}\ndomain {domain}")


def link(root: Path, source: int, number: int, target: int, kind: int, megabytes: int) -> None:
    """One link of a node."""
    said = f"type {kind}\nnode_from {source}\nnode_to {target}\nmin_bandwidth 1\nmax_bandwidth {megabytes}"
    put(root, f"{NODES}/{source}/io_links/{number}/properties", said)


def test_gpus_of_amd_and_the_rates_of_their_links(tmp_path: Path) -> None:
    """By PCI bus id. XGMI between two GPUs counts, PCIe and what leads to a processor do not."""
    node(tmp_path, 0, 0, 0)
    node(tmp_path, 1, 4711, 0x1B00)
    node(tmp_path, 2, 4712, 0x2C01, 1)
    node(tmp_path, 3, 4713, 0x3D00)
    link(tmp_path, 1, 0, 0, 2, 16000)
    link(tmp_path, 1, 1, 2, 11, 64000)
    link(tmp_path, 2, 1, 1, 11, 64000)
    link(tmp_path, 2, 2, 3, 2, 32000)
    link(tmp_path, 0, 0, 1, 11, 50000)
    assert read_gpus(tmp_path) == Gpus(
        (Device(G0, "xgmi", 512 * 10**9, True), Device(G2, "gpu", 0, True), Device(G1, "xgmi", 512 * 10**9, True)),
        {(G0, G1): 64 * 10**9, (G1, G0): 64 * 10**9},
    )


def test_xgmi_without_a_rate(tmp_path: Path) -> None:
    """amdgpu says that a device has it, and nobody how fast it is: not known. So with a rate of 0."""
    put(tmp_path, f"devices/{G0}/xgmi_device_id", "123")
    for card, target in (("card0", G0), ("card1", G2)):
        (tmp_path / f"devices/{target}").mkdir(exist_ok=True)
        (tmp_path / f"sys/class/drm/{card}").mkdir(parents=True)
        (tmp_path / f"sys/class/drm/{card}/device").symlink_to(tmp_path / f"devices/{target}")
    assert read_gpus(tmp_path).devices == (Device(G0, "xgmi", 0, True),)
    node(tmp_path, 1, 4711, 0x1B00)
    node(tmp_path, 2, 4712, 0x3D00)
    link(tmp_path, 1, 0, 2, 11, 0)
    assert read_gpus(tmp_path) == Gpus((Device(G0, "xgmi", 0, True), Device(G2, "xgmi", 0, True)), {(G0, G2): 0})


def test_gpus_of_nvidia(tmp_path: Path) -> None:
    """By the driver's list; by the devices where a container hides that."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        put(tmp_path, f"dev/{name}", "")
    assert [device.name for device in read_gpus(tmp_path).devices] == ["nvidia0", "nvidia1"]
    put(tmp_path, "proc/driver/nvidia/gpus/0000:1B:00.0/information", "")
    assert read_gpus(tmp_path) == Gpus((Device("0000:1b:00.0", "gpu", 0, True),), {})


def test_a_host_without(tmp_path: Path) -> None:
    """And one that shows nothing."""
    assert read_gpus(tmp_path / "none") == Gpus()
