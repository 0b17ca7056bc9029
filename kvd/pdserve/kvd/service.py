"""The gRPC face of the daemon for engines: decode, call, encode. Operators have `operator`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import structlog

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.kvd import codec
from pdserve.kvd.attachments import Member
from pdserve.kvd.client.messages import Participant
from pdserve.kvd.node import Node
from pdserve.rpc.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.runtime.failpoints import Point, failpoint, passing

log = structlog.get_logger(__name__)

_TELL = {
    Participant.SCHEDULER: Point.KVD_TELL_SCHEDULER,
    Participant.WORKER: Point.KVD_TELL_WORKER,
    Participant.HOST: Point.KVD_TELL_HOST,
}

_AttachContext = grpc.aio.ServicerContext[kvd_pb2.AttachRequest, kvd_pb2.AttachResponse]


class KvdService(kvd_pb2_grpc.KvdServicer):
    """Attach: one stream per participant."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Attach(
        self, request_iterator: AsyncIterator[kvd_pb2.AttachRequest], context: _AttachContext
    ) -> AsyncIterator[kvd_pb2.AttachResponse]:
        """See kvd.proto."""
        try:
            async with asyncio.timeout(self._node.config.hello_timeout):
                first = await anext(request_iterator)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidRequest("no hello") from None
        hello, pid = codec.decode_hello(first)
        member, stream, welcome = self._node.attach(hello, pid)
        # Called however the call ends, also where this generator is not closed in time.
        context.add_done_callback(lambda _: self._node.detach(member, stream))  # type: ignore[arg-type]  # not a Protocol
        reader = asyncio.create_task(self._read(member, stream, request_iterator))
        try:
            yield codec.encode_welcome(welcome)
            while (message := await member.next(stream)) is not None:
                for arriving in await passing(_TELL[member.kind], message, (member, stream)):
                    yield codec.encode(arriving)
        finally:
            self._node.detach(member, stream)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def close(self) -> None:
        """Ends every stream: the daemon stops."""
        for member in self._node.attachments.everybody():
            member.fail(Unavailable("kvd stops"))

    async def _read(self, member: Member, stream: int, requests: AsyncIterator[kvd_pb2.AttachRequest]) -> None:
        """Hands on what comes, in order, and ends the stream with whatever is wrong with it."""
        error: PdserveError = Unavailable("the stream has ended")
        try:
            async for request in requests:
                await failpoint(Point.KVD_HEARD)
                self._node.handle(member.engine_id, codec.decode(request))
        except PdserveError as refused:
            log.warning("attach_refused", engine_id=member.engine_id, reason=refused.reason, error=refused.message)
            error = refused
        except grpc.aio.BaseError as broken:
            log.info("attach_broken", engine_id=member.engine_id, error=str(broken))
        except Exception as defect:  # noqa: BLE001  # counted, logged, and told to the caller
            self._node.defect(defect)
            error = PdserveError(f"{type(defect).__name__}: {defect}")
        member.fail_stream(stream, error)
