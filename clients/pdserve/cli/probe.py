"""Asks the processes of a deployment how they are, over gRPC."""

import grpc

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error

_SERVING = b"\x08\x01"
"""HealthCheckResponse(status=SERVING). Spelled out: the light client has no grpcio-health-checking."""


def _as_is(message: bytes) -> bytes:
    return message


async def serving(target: str, timeout: float = 2.0) -> bool:
    """Whether the process at `target` says that it serves; False also where nobody answers in time."""
    async with aio_channel(target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=_as_is, response_deserializer=_as_is
        )
        try:
            return bool(await check(b"", timeout=timeout) == _SERVING)
        except grpc.aio.AioRpcError:
            return False


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
