"""The folder of a deployment: private, one at a time, found by other commands."""

import contextlib
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from pdserve.cli import deployment
from pdserve.cli.plan import Ports, Spec, make_plan
from pdserve.rpc.errors import ConfigError

SPEC = Spec(served_name="m")
PLAN = make_plan(SPEC, Path("/tmp/s"), Ports(1, 2, 3, (4, 5)), "python", ())


def test_a_published_deployment_is_found_while_it_runs(tmp_path: Path) -> None:
    """`find` gives what was published, and refuses before it is ready and after it has ended."""
    folder = tmp_path / "d"
    with pytest.raises(ConfigError, match="no deployment runs"):
        deployment.find(folder)
    with deployment.claimed(folder):
        with pytest.raises(ConfigError, match="not ready yet"):
            deployment.find(folder)
        deployment.publish(folder, PLAN, {"kvd": 7}, {"kvd": 1})
        found = deployment.find(folder)
        assert (found.grpc, found.http, found.model) == ("127.0.0.1:1", "http://127.0.0.1:2", "m")
        assert (found.processes, found.restarts) == ({"kvd": 7}, {"kvd": 1})
    with pytest.raises(ConfigError, match="no deployment runs"):
        deployment.find(folder)


def test_a_record_left_by_a_killed_deployment_is_not_believed(tmp_path: Path) -> None:
    """up.json without a holder of the lock is old: it is not found, and the next deployment removes it."""
    (tmp_path / "up.lock").touch()
    (tmp_path / "up.json").write_text("{}")
    with pytest.raises(ConfigError, match="no deployment runs"):
        deployment.find(tmp_path)
    with deployment.claimed(tmp_path), pytest.raises(ConfigError, match="not ready yet"):
        deployment.find(tmp_path)


def test_a_folder_serves_one_deployment_at_a_time(tmp_path: Path) -> None:
    """A second claim is refused by name and leaves the first alone."""
    with deployment.claimed(tmp_path):
        deployment.publish(tmp_path, PLAN, {}, {})
        with pytest.raises(ConfigError, match="already"), deployment.claimed(tmp_path):
            pass
        assert deployment.find(tmp_path).grpc == PLAN.grpc


def test_the_key_is_fresh_and_private(tmp_path: Path) -> None:
    """Folder and key can be read by us only; each deployment has another key, gone when it ends."""
    keys = []
    for _ in range(2):
        with deployment.claimed(tmp_path):
            key = tmp_path / "cluster.key"
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
            assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
            keys.append(key.read_bytes().strip())
        assert not key.exists()
    assert keys[0] != keys[1]
    assert min(len(key) for key in keys) >= 32


def test_a_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    """In /tmp anybody may have put something in our way: a symbolic link is not followed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="somebody else"), deployment.claimed(tmp_path / "link"):
        pass


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    """A folder that cannot be made is a ConfigError that names it."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use"), deployment.claimed(tmp_path / "file" / "d"):
        pass


def test_a_record_of_another_version_is_a_clear_error(tmp_path: Path) -> None:
    """Unknown or missing keys in up.json are said, not passed over."""
    with deployment.claimed(tmp_path):
        (tmp_path / "up.json").write_text(json.dumps({"grpc": "x", "new": 1}))
        with pytest.raises(ConfigError, match="not what this version"):
            deployment.find(tmp_path)


def test_ports_are_free_distinct_and_the_wanted_ones_where_they_can_be() -> None:
    """A wanted port that is taken gives way to another; no port is given twice."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        busy = taken.getsockname()[1]
        with deployment.free_ports(3, busy, 0) as ports:
            every = every_port(ports)
    assert busy not in every
    assert len(set(every)) == 12
    with socket.socket() as again:
        again.bind(("127.0.0.1", ports.grpc))
    with deployment.free_ports(1, ports.grpc, 0) as same:
        assert same.grpc == ports.grpc


def test_ports_are_held_for_our_services() -> None:
    """While they are held nobody else gets one, not even by its number, and nobody answers there; a server that sets
    SO_REUSEADDR, as ours do, serves there all the same, and again after it has ended."""
    with contextlib.ExitStack() as stack, deployment.free_ports(2, 0, 0) as ports:
        others = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(200)]
        assert not {other.getsockname()[1] for other in others} & set(every_port(ports))
        for port in every_port(ports):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
                caller.connect(("127.0.0.1", port))
            for _ in range(2):
                with socket.socket() as ours, socket.socket() as caller:
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    ours.bind(("127.0.0.1", port))
                    ours.listen()
                    caller.connect(("127.0.0.1", port))


def every_port(ports: Ports) -> list[int]:
    return [ports.grpc, ports.http, ports.ping, ports.otlp, ports.traces, *ports.engines, *ports.metrics]


def test_the_default_folder_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """$XDG_RUNTIME_DIR where there is one, else a name of our own in /tmp."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert deployment.default_dir() == Path("/run/user/7/pdserve")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert deployment.default_dir() == Path(f"/tmp/pdserve-{os.getuid()}")
