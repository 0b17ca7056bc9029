"""Asks the processes of a deployment how they are, over gRPC."""

import grpc

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli.plan import Process
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error

_SERVING = b"\x08\x01"
"""HealthCheckResponse(status=SERVING). Spelled out: the light client has no grpcio-health-checking."""
_HEALTHS = (_SERVING, b"\x08\x02")
"""With NOT_SERVING."""


def _as_is(message: bytes) -> bytes:
    return message


async def up(process: Process, timeout: float = 2.0) -> bool:
    """Whether a process has started: it says that it serves. A proxy need only answer: it may wait for its engines."""
    return await _health(process.target, timeout) in (_HEALTHS if process.kind == "proxy" else (_SERVING,))


async def serving(target: str, timeout: float = 2.0) -> bool:
    """Whether the process at `target` says that it serves; False also where nobody answers in time."""
    return await _health(target, timeout) == _SERVING


async def _health(target: str, timeout: float) -> bytes:
    """What a process says of its health; empty where nobody answers in time."""
    async with aio_channel(target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=_as_is, response_deserializer=_as_is
        )
        try:
            return bytes(await check(b"", timeout=timeout))
        except grpc.aio.AioRpcError:
            return b""


async def describe_kvd(target: str, timeout: float = 5.0) -> kvd_pb2.DescribeResponse:
    """What kvd holds now.

    Raises:
        PdserveError: it does not answer.
    """
    async with aio_channel(target) as channel:
        try:
            return await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
