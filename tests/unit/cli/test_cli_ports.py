"""The ports of a deployment are its own from the moment in which they are chosen, also against another `pdserve up`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.cli import deployment
from pdserve.cli.plan import Ports
from pdserve.rpc.errors import ConfigError

CHOOSE = """
import sys
from pdserve.cli import deployment
sys.stdin.readline()
with deployment.free_ports(3, int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])) as ports:
    print(ports.grpc, ports.http, ports.ping, ports.otlp, ports.traces, *ports.engines, *ports.metrics, flush=True)
    sys.stdin.readline()
"""


def every(ports: Ports) -> list[int]:
    return [ports.grpc, ports.http, ports.ping, ports.otlp, ports.traces, *ports.engines, *ports.metrics]


@contextlib.contextmanager
def unused(count: int) -> Iterator[list[int]]:
    """Ports that were free a moment ago, and that the kernel gives to nobody who asks for any."""
    with contextlib.ExitStack() as stack:
        holds = [stack.enter_context(socket.socket()) for _ in range(count)]
        for hold in holds:
            hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            hold.bind(("127.0.0.1", 0))
        yield [hold.getsockname()[1] for hold in holds]


def test_a_second_deployment_gets_other_ports() -> None:
    """Both want the same, and none of the first one's services listens yet: the first has them, and when it has ended
    they are to be had again."""
    with unused(4) as wanted:
        with deployment.free_ports(3, *wanted) as first, deployment.free_ports(3, *wanted) as second:
            assert [first.grpc, first.http, first.otlp, first.traces] == wanted
            assert not set(every(first)) & set(every(second))
        with deployment.free_ports(3, *wanted) as third:
            assert [third.grpc, third.http, third.otlp, third.traces] == wanted


def test_a_port_is_kept_while_its_service_is_away() -> None:
    """A service that ends and starts again finds it: another deployment that comes meanwhile does not take it."""
    with unused(1) as (wanted,), deployment.free_ports(1, wanted, 0) as ports:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", ports.grpc)):
                pass
            with deployment.free_ports(1, wanted, 0) as other:
                assert other.grpc != wanted


def test_dying_connections_keep_no_port() -> None:
    """The wanted port has one in TIME_WAIT, as after each deployment that was asked something: it is to be had."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        wanted = server.getsockname()[1]
        ours, _ = server.accept()
        ours.close()  # who closes first keeps the connection for a minute
        assert caller.recv(1) == b""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", wanted))  # it is there
    with deployment.free_ports(1, wanted, 0) as ports:
        assert ports.grpc == wanted


def test_many_that_start_at_once_share_no_port() -> None:
    """Processes of their own, let go in the same moment, all with the same wishes: each has its own ports, and every
    wish was fulfilled once. What one had that was killed is free at once."""
    with unused(4) as wanted, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CHOOSE, *map(str, wanted)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    bufsize=1,
                )
            )
            for _ in range(4)
        ]
        for process in processes:
            stack.callback(process.kill)
        told = []
        for go in (True, False):
            for process in processes:
                assert process.stdin is not None
                assert process.stdout is not None
                if go:
                    process.stdin.write("\n")
                else:
                    told.append([int(word) for word in process.stdout.readline().split()])
        chosen = [port for ports in told for port in ports]
        assert len(chosen) == 4 * 12
        assert len(set(chosen)) == len(chosen)
        assert set(wanted) <= set(chosen)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        with deployment.free_ports(3, *wanted) as ports:
            assert [ports.grpc, ports.http, ports.otlp, ports.traces] == wanted


def test_the_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel offers nothing but what others have: an error that says so, and no port is kept."""
    with deployment.free_ports(1, 0, 0) as first:
        taken, bind = first.grpc, socket.socket.bind
        asked: list[int] = []

        def offers_what_is_taken(self: socket.socket, address: Any) -> None:
            if isinstance(address, tuple):
                asked.append(address[1])
                address = (address[0], taken)
            bind(self, address)

        monkeypatch.setattr(socket, "socket", type("Mine", (socket.socket,), {"bind": offers_what_is_taken}))
        with pytest.raises(ConfigError, match=r"no TCP port is free on 127\.0\.0\.1"), deployment.free_ports(1, 7, 0):
            pass
        assert 1 < len(asked) < 1000
        assert asked[0] == 7
        assert set(asked[1:]) == {0}
