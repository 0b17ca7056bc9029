"""What a process says of its health, and what `pdserve up` makes of it."""

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from pdserve.cli import probe
from pdserve.cli.plan import Kind, Process
from tests.unit.cli.fakes import WAIT

_STATES = {"serving": b"\x08\x01", "not serving": b"\x08\x02"}


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a process with the parameter's health."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    check: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        lambda *_: _STATES[request.param], request_deserializer=bytes, response_serializer=bytes
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("answering", "kind", "up"),
    [
        ("serving", "engine", True),
        ("serving", "proxy", True),
        ("not serving", "engine", False),
        ("not serving", "kvd", False),
        ("not serving", "proxy", True),
    ],
    indirect=["answering"],
)
async def test_a_proxy_has_started_when_it_answers(answering: str, kind: Kind, up: bool) -> None:
    """It may wait for engines of another node, and what is missing is then said by name. All others must serve."""
    process = Process("it", kind, ("python",), answering, Path("log"))
    assert await probe.up(process, timeout=WAIT) is up


@pytest.mark.parametrize("kind", ["engine", "proxy"])
async def test_what_does_not_answer_has_not_started(kind: Kind) -> None:
    """Whatever it is."""
    assert not await probe.up(Process("it", kind, ("python",), "127.0.0.1:1", Path("log")), timeout=1.0)
