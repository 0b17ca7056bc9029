"""Asks a node's kvd what moves KV bytes there."""

import grpc

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.bench.transport import KvdFacts
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error


async def ask(target: str, timeout: float) -> KvdFacts:
    """What the kvd at a gRPC target says of itself.

    Raises:
        PdserveError: it does not answer within `timeout` seconds.
    """
    async with aio_channel(target) as channel:
        try:
            told = await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
    return KvdFacts(tuple(told.transports), told.copier)
