"""`pdserve up` on one of several nodes: what it starts there, what it refuses, and the commands of the page."""

import argparse
import os
import re
import shlex
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pdserve.cli import deployment, model, up
from pdserve.cli.__main__ import main
from pdserve.cli.plan import Plan, Ports, Process, Spec, engine_names, make_plan
from pdserve.cli.up_node import PING_PORT, Node, at
from pdserve.decode.__main__ import PROGRAM as DECODE
from pdserve.engine.hosting.program import Program, read
from pdserve.kvd.__main__ import parse
from pdserve.kvd.config import TransportName
from pdserve.prefill.__main__ import PROGRAM as PREFILL
from pdserve.rpc.errors import ConfigError
from pdserve.rpc.key_file import read_key_file

STATE = Path("/tmp/s")
KEY = Path("cluster.key")
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def flag(process: Process, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def planned(spec: Spec) -> Plan:
    engines = len(engine_names(spec))
    ports = Ports(50050, 8000, PING_PORT, tuple(range(10, 10 + engines)), metrics=tuple(range(1, engines + 2)))
    return make_plan(spec, STATE, ports, "python", ())


def spec(*words: str) -> Spec:
    """What `pdserve up` with these words asks for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    up.arguments(parser)
    args = parser.parse_args(list(words))
    args.rest = []
    return up.spec_of(args)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The file of a key that all nodes have."""
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("of all nodes, and long enough")
    return file


def free_port() -> str:
    """Of loopback, a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def sim(*words: str) -> Spec:
    return spec("--engine", "sim", *words)


def test_two_nodes_find_each_other() -> None:
    """The first has the proxy; the second's engines register with it, at the port that both know. What listens for
    the other node does so at the node's own address, metrics stay on loopback."""
    key = ("--cluster-key-file", "k")
    first = planned(sim("--host", "10.0.0.1", *key, "--decode", "0"))
    second = planned(sim("--host", "10.0.0.2", *key, "--prefill", "0", "--proxy", "10.0.0.1:50050"))
    assert [p.name for p in first.processes] == ["kvd", "prefill-0", "traces", "proxy"]
    assert [p.name for p in second.processes] == ["kvd", "decode-0"]
    proxy = first.processes[-1]
    assert (flag(proxy, "--host"), flag(proxy, "--ping-port")) == ("10.0.0.1", str(PING_PORT))
    for made, host in ((first, "10.0.0.1"), (second, "10.0.0.2")):
        kvd, engine = made.processes[:2]
        assert flag(engine, "--proxy") == f"10.0.0.1:{PING_PORT}"
        assert (flag(engine, "--host"), engine.target) == (host, f"{host}:10")
        assert {"--transport=nixl", f"--peer-listen={host}:50052"} <= set(kvd.argv)
        assert {flag(p, "--metrics-host") for p in (kvd, engine)} == {"127.0.0.1"}
    assert (first.grpc, first.http) == ("10.0.0.1:50050", "http://10.0.0.1:8000")
    assert (second.grpc, second.http, second.traces) == ("10.0.0.1:50050", "", "")
    assert "--route" not in proxy.argv, "the pair's other half comes from another node"


def test_what_is_said_of_kvd_is_the_last_word(key: Path) -> None:
    """A setting of kvd's stands behind what the node has for it, so that it is the one that counts."""
    made = planned(sim("--host", "10.0.0.1", "--cluster-key-file", "k", "--insecure", "--kvd", "peer-listen=10.1.0.1:7",
                       "--kvd", "transport=shm", "--kvd", "peer-address=a:8"))  # fmt: skip
    config, _ = parse([*made.processes[0].argv[3:], "--cluster-key-file", str(key)])
    assert (config.peer.listen, config.peer.address, config.transport) == ("10.1.0.1:7", "a:8", TransportName.SHM)
    assert config.insecure


def test_a_machine_by_itself_has_no_peers() -> None:
    """Without --host nothing listens beyond loopback, and kvd has no port."""
    kvd, *rest = planned(sim()).processes
    assert not [word for word in kvd.argv if "peer" in word or "transport" in word or "insecure" in word]
    assert {flag(process, "--host") for process in rest} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--proxy", "a:1"], "--proxy is for one of several nodes"),
        (["--insecure"], "--insecure is for one of several nodes"),
        (["--ping-port", "5"], "--ping-port is for one of several nodes"),
        (["--cluster-key-file", "k"], "--cluster-key-file is for one of several nodes"),
        (["--host", "a"], "the same --cluster-key-file"),
        (["--host", "0.0.0.0", "--cluster-key-file", "k"], "no address that other nodes can call"),
        (["--host", "[::]", "--cluster-key-file", "k"], "no address that other nodes can call"),
        (["--host", "", "--cluster-key-file", "k"], "no address that other nodes can call"),
        (["--host", "a", "--cluster-key-file", "k", "--proxy", "b"], "not HOST:PORT"),
        (["--host", "a", "--cluster-key-file", "k", "--proxy", ":1"], "not HOST:PORT"),
        (["--host", "a", "--cluster-key-file", "k", "--ping-port", "0"], "not in 1..65535"),
        (["--decode", "0"], "come in pairs"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: list[str], says: str) -> None:
    """Before anything starts, and with what is missing."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        sim(*words)


PROXYS = {
    "--mode": ["read"],
    "--on-failure": ["fail"],
    "--hold-timeout": ["0"],
    "--grpc-port": ["0"],
    "--http-port": ["8000"],
    "--traces-port": ["16686"],
    "--no-traces": [],
}
"""What of `pdserve up` is for a proxy here, or for what is started with it."""


@pytest.mark.parametrize("words", [[name, *value] for name, value in PROXYS.items()], ids=lambda words: words[0])
def test_what_is_the_proxys_is_refused_without_one(words: list[str]) -> None:
    """By name, where another node has the proxy: it would have no effect. A value that is the default is no exception;
    with the proxy here each is taken."""
    node = ("--host", "a", "--cluster-key-file", "k")
    with pytest.raises(ConfigError, match=re.escape(f"{words[0]} is the proxy's: give it on the node that has it")):
        sim(*node, "--proxy", "b:1", *words)
    sim(*node, *words)
    with pytest.raises(ConfigError, match="--mode, --hold-timeout are the proxy's: give them on"):
        sim(*node, "--proxy", "b:1", "--hold-timeout", "3", "--mode", "read")


def test_no_other_flag_of_up_is_the_proxys() -> None:
    """What the plan tells a proxy is refused without one here, or the node's own, or ours: whoever adds a flag of the
    proxy to `up` has to say so."""
    proxy = planned(sim(*(word for name, value in PROXYS.items() for word in (name, *value)))).processes[-1]
    told = {word for word in proxy.argv if word.startswith("--")}
    assert told - {"--host", "--ping-port", "--beats-missed"} == PROXYS.keys() - {"--traces-port", "--no-traces"}


def test_a_node_without_the_proxy_takes_no_port_of_it() -> None:
    """Nor of the trace store: another deployment on the machine may want them."""
    args, parser = argparse.Namespace(), argparse.ArgumentParser()
    up.arguments(parser)
    parser.parse_args([], args)
    node = ("--host", "a", "--cluster-key-file", "k")
    assert up.WantedPorts.of(sim(*node, "--proxy", "b:1"), args) == up.WantedPorts(0, 0, 0, 0)
    assert up.WantedPorts.of(sim(*node, "--no-traces"), args) == up.WantedPorts(50050, 8000, 0, 0)
    assert up.WantedPorts.of(sim(), args) == up.WantedPorts(50050, 8000, 4317, 16686)


def test_addresses_of_ipv6_have_brackets() -> None:
    """However they were given."""
    assert at("fd00::1", 5) == at("[fd00::1]", 5) == "[fd00::1]:5"
    assert at("node-a", 5) == "node-a:5"
    assert Node("fd00::1", KEY, proxy="[fd00::2]:50050").registration() == f"[fd00::2]:{PING_PORT}"


def test_the_nodes_key_is_used_and_kept(tmp_path: Path, key: Path) -> None:
    """The deployment works with a copy, which goes with it; the file that was given stays. One that is not there is
    refused, and so is the deployment's own, which would go with it."""
    folder, said = tmp_path / "d", key.read_text()
    with deployment.claimed(folder, key):
        assert (folder / "cluster.key").read_text() == said
    assert not (folder / "cluster.key").exists()
    assert key.read_text() == said
    with pytest.raises(ConfigError, match="No such file"), deployment.claimed(folder, tmp_path / "none"):
        pass
    own = folder / "cluster.key"
    own.touch(0o600)
    own.write_text("mine")
    with pytest.raises(ConfigError, match="keep yours elsewhere"), deployment.claimed(folder, own):
        pass
    assert own.read_text() == "mine"


def test_a_ping_port_that_is_taken_is_refused(tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one would do for this node, and the other node's engines would never find it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        words = ("up", "--engine", "sim", "--host", "127.0.0.1", "--cluster-key-file", str(key), "--ping-port", port)
        assert main([*words, "--grpc-port", "0", "--http-port", "0", "--state-dir", str(tmp_path / "d")]) == 1
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "face"), [("--grpc-port", "gRPC"), ("--http-port", "HTTP")])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "default"])
def test_a_port_of_the_proxys_that_is_taken_is_refused(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    flag: str, face: str, asked: bool,
) -> None:  # fmt: skip
    """Other nodes were told the address: at it they would find a stranger. That goes for the default as well."""
    monkeypatch.setattr(up, "_serve", AsyncMock(return_value=0))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["up", "--engine", "sim", "--host", "127.0.0.1", "--cluster-key-file", str(key),
                 "--ping-port", free_port(), "--state-dir", str(tmp_path / "d")]  # fmt: skip
        for name in {"--grpc-port", "--http-port"} - {flag}:
            words += [name, "0"]
        if asked:
            words += [flag, str(port)]
        else:
            monkeypatch.setattr(up, {"gRPC": "GRPC_PORT", "HTTP": "HTTP_PORT"}[face], port)
        assert main(words) == 1
    said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is taken" in said
    assert face in said
    assert flag in said


def test_any_port_will_do_where_zero_is_said(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is no promise to other nodes, and without --host there are none: a port that is taken gives way."""
    monkeypatch.setattr(up, "_serve", served := AsyncMock(return_value=0))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        node = ("--host", "127.0.0.1", "--cluster-key-file", str(key), "--ping-port", free_port(), "--grpc-port", "0")
        for words in ((*node, "--http-port", "0"), ("--grpc-port", taken, "--http-port", taken)):
            assert main(["up", "--engine", "sim", *words, "--state-dir", str(tmp_path / "d")]) == 0
    assert served.await_count == 2


def test_a_key_that_others_may_read(tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Ours is refused, with the command that mends it; one that we cannot change is used, with a warning."""
    monkeypatch.setattr(up, "_serve", served := AsyncMock(return_value=0))
    ports = ("--ping-port", free_port(), "--grpc-port", "0", "--http-port", "0")
    words = ["up", "--engine", "sim", "--host", "127.0.0.1", "--cluster-key-file", str(key), *ports,
             "--state-dir", str(tmp_path / "d")]  # fmt: skip
    key.chmod(0o644)
    assert main(words) == 1
    assert f"chmod 600 {key}" in capsys.readouterr().err
    assert not served.await_count
    monkeypatch.setattr(os, "fstatvfs", lambda file: os.statvfs_result((0, 0, 0, 0, 0, 0, 0, 0, os.ST_RDONLY, 0)))
    assert main(words) == 0
    assert "mode 0644" in capsys.readouterr().out


def test_the_pages_command_makes_a_key_for_its_owner_alone(tmp_path: Path) -> None:
    """docs/cli.md: each line that writes cluster.key, run under the usual umask, makes a file that `up` takes."""
    commands = [line for line in PAGE.read_text().splitlines() if "> cluster.key" in line]
    assert commands
    for command in commands:
        script = command.replace("openssl rand -hex 32", "echo a key that is long enough")
        assert script != command
        subprocess.run(["sh", "-c", f"umask 022; {script}"], cwd=tmp_path, check=True)
        made = tmp_path / "cluster.key"
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        assert read_key_file(made) == b"a key that is long enough\n"
        made.unlink()


def test_a_host_that_is_not_this_one_is_refused(tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a mistake in --host is: by name, before anything starts."""
    words = ("up", "--engine", "sim", "--host", "192.0.2.1", "--cluster-key-file", str(key))  # TEST-NET-1: nobody's
    assert main([*words, "--state-dir", str(tmp_path / "d")]) == 1
    assert "no TCP port is free on 192.0.2.1: [Errno 99]" in capsys.readouterr().err


def test_the_commands_of_the_page_start_two_nodes(monkeypatch: pytest.MonkeyPatch, key: Path) -> None:
    """docs/cli.md: each `pdserve up` of its section on two nodes is understood by `up`, and what that starts by kvd
    and the engines: one pair, over nixl, encrypted where certificates are given."""
    monkeypatch.setattr(model, "resolve", lambda name: (f"/models/{name}", name))
    section = PAGE.read_text().partition("## A deployment on two nodes")[2].partition("\n## ")[0]
    blocks = [[shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
              for block in re.findall(r"```\n(.*?)```", section, re.DOTALL)]  # fmt: skip
    commands = [[words[2:] for words in block if words[:2] == ["pdserve", "up"]] for block in blocks]
    pairs = [block for block in commands if block]
    assert [len(block) for block in pairs] == [2, 2]
    for block, encrypted in zip(pairs, (False, True), strict=True):
        made = [planned(spec(*words)) for words in block]
        roles: list[Any] = []
        for one in made:
            kvd, engine = one.processes[:2]
            config, _ = parse([*kvd.argv[3:], "--cluster-key-file", str(key)])
            assert (config.transport, config.peer.tls, config.insecure) == (
                TransportName.NIXL, encrypted, not encrypted)  # fmt: skip
            program: Program[Any] = PREFILL if engine.name.startswith("prefill") else DECODE
            plan = read(program, [*engine.argv[3:], "--cluster-key-file", str(key)])
            assert plan.host.proxy == f"10.0.0.1:{PING_PORT}"
            roles.append(plan.role)
        assert roles == ["prefill", "decode"]
