"""Two `pdserve up` that make one deployment, as on two nodes, here on one: simulated engines, real processes."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Up

pytestmark = pytest.mark.timeout(150)


def free_port() -> int:
    """Of loopback, a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def nodes(launch: "Callable[..., Up]", tmp_path_factory: pytest.TempPathFactory) -> "tuple[Up, Up]":
    """The one with prefill and the proxy, and the one with decode, which is started first."""
    key = tmp_path_factory.mktemp("nodes") / "key"
    key.touch(0o600)
    key.write_text("the key of these two nodes")
    grpc, ping = str(free_port()), str(free_port())
    # sim: the transport that reaches another daemon of the same host without a network.
    both = ("--engine", "sim", "--host", "127.0.0.1", "--cluster-key-file", str(key), "--ping-port", ping,
            "--kvd", "transport=sim", "--kvd", "peer-listen=127.0.0.1:0")  # fmt: skip
    decode = launch(*both, "--prefill", "0", "--proxy", f"127.0.0.1:{grpc}")
    prefill = launch(*both, "--decode", "0", "--grpc-port", grpc)
    return prefill, decode


@pytest.mark.parametrize("mode", ["read", "write"])
def test_both_nodes_answer_with_kv_of_the_other(nodes: "tuple[Up, Up]", mode: str) -> None:
    """Asked on either node, prefill of the one and decode of the other answer, and the KV is handed over."""
    for up in nodes:
        up.ready()
        said = up.command("generate", "a" * 100, "--max-tokens", "8", "--temperature", "0", "--mode", mode, "--json",
                          "--on-failure", "fail")  # fmt: skip
        assert said.returncode == 0, said.stderr
        answer = json.loads(said.stdout)
        assert (answer["mode"], answer["fallbacks"]) == (mode, 0)
        assert answer["transfer"]["kv_bytes"] > 0


def test_each_node_shows_what_it_has(nodes: "tuple[Up, Up]") -> None:
    """Status lists both engines and this node's processes; kvd shows the other's daemon, and the engines of its own."""
    for up, others in zip(nodes, (("prefill-0", "proxy", "traces"), ("decode-0",)), strict=True):
        record = up.ready()
        assert set(record.processes) == {"kvd", *others}
        status = up.command("status")
        assert status.returncode == 0, status.stderr
        engines, _, processes = status.stdout.partition("\n\n")
        assert {line.split()[0] for line in processes.splitlines()[2:]} == set(record.processes)
        assert sorted(line.split()[1] for line in engines.splitlines()[-2:]) == ["decode", "prefill"]
        assert ("the proxy is on another node" in status.stdout) == (not record.http)
        described = json.loads(up.command("kvd", "describe", "--json").stdout)
        assert [peer["state"] for peer in described["peers"]] == ["open"]
        assert len(described["engines"]) == 1


def test_the_second_node_leaves_and_comes_back(nodes: "tuple[Up, Up]", launch: "Callable[..., Up]") -> None:
    """Its drain ends with status 0 and leaves no process; the first goes on, and serves again with one that comes."""
    prefill, decode = nodes
    record = decode.ready()
    command = cast("list[str]", decode.process.args)
    assert decode.end(signal.SIGINT) == 0, decode.out.read_text()
    assert decode.left(record) == []
    assert prefill.process.poll() is None
    again = launch(*command[command.index("--engine") :])
    again.ready()
    said = again.command("generate", "a" * 100, "--max-tokens", "8", "--json", "--on-failure", "fail")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["transfer"]["kv_bytes"] > 0
    for up in (again, prefill):
        assert up.end(signal.SIGINT) == 0, up.out.read_text()


def test_a_node_whose_proxy_does_not_answer_says_so(launch: "Callable[..., Up]", tmp_path: Path) -> None:
    """After its patience it ends, with the reason."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("the key of these two nodes")
    up = launch("--engine", "sim", "--host", "127.0.0.1", "--cluster-key-file", str(key), "--prefill", "0",
                "--kvd", "transport=sim", "--kvd", "peer-listen=127.0.0.1:0", "--proxy", f"127.0.0.1:{free_port()}",
                "--start-timeout", "8")  # fmt: skip
    assert up.process.wait(60) == 1
    assert "not ready within 8 s: proxy: " in up.out.read_text()
