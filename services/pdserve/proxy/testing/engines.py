"""Engines without a model: real gRPC servers with a Prefill and a Decode servicer, and a real registration."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import zmq
import zmq.asyncio

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.rpc.status import ErrorInterceptor
from pdserve.runtime import beats
from pdserve.runtime.clock import Clock, boot_id
from pdserve.runtime.config import split_address
from pdserve.runtime.signing import Signer

PrefillWork = Callable[["FakeEngine", prefill_pb2.PrefillRequest], AsyncIterator[prefill_pb2.PrefillResponse]]
DecodeWork = Callable[["FakeEngine", decode_pb2.DecodeRequest], AsyncIterator[decode_pb2.DecodeResponse]]


@dataclass
class Handovers:
    """What fake engines share instead of kvd: which transfers were taken."""

    taken: dict[bytes, asyncio.Event] = field(default_factory=dict)

    def of(self, transfer_id: bytes) -> asyncio.Event:
        """Set once the transfer's consumers have what they need."""
        return self.taken.setdefault(transfer_id, asyncio.Event())


async def prompt_prefill(engine: "FakeEngine", request: prefill_pb2.PrefillRequest) -> AsyncIterator[Any]:
    """Offers at once, and releases when decode has taken the transfer."""
    yield prefill_pb2.PrefillResponse(
        ready=prefill_pb2.Ready(
            ticket=b"ticket " + request.transfer_id,
            first_token_id=65,
            cached_tokens=engine.cached_tokens,
            stamps=engine.stamps(5, 6, 7),
        )
    )
    await engine.handovers.of(request.transfer_id).wait()
    yield prefill_pb2.PrefillResponse(released=prefill_pb2.Released())


async def echo_decode(engine: "FakeEngine", request: decode_pb2.DecodeRequest) -> AsyncIterator[Any]:
    """Answers "abc..." one letter a token, max_tokens of them, in each of the n answers."""
    if request.HasField("source"):
        engine.handovers.of(request.source.transfer_id).set()
    sampling = request.sampling
    answers = sampling.n or 1
    stamps: common_pb2.Stamps | None = engine.stamps(8, 9, 10, 11, 12, 13)
    for at in range(sampling.max_tokens):
        for index in range(answers):
            letter = chr(97 + at % 26)
            last = at == sampling.max_tokens - 1
            yield decode_pb2.DecodeResponse(
                tokens=decode_pb2.Tokens(
                    index=index,
                    text=letter,
                    token_ids=[ord(letter)],
                    finish_reason=common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED,
                    logprobs=[_logprobs(letter, sampling.logprobs)] if sampling.HasField("logprobs") else [],
                    stamps=stamps,
                )
            )
            stamps = None
    facts = common_pb2.TransferFacts(kv_bytes=1024, transport="fake") if request.HasField("source") else None
    yield decode_pb2.DecodeResponse(
        finished=decode_pb2.Finished(completion_tokens=answers * sampling.max_tokens, transfer=facts)
    )


class FakeEngine:
    """A service of one engine. Set `on_prefill` and `on_decode` to change what it does."""

    _serial = itertools.count(1)

    def __init__(
        self,
        role: beats.Role,
        signer: Signer,
        handovers: Handovers | None = None,
        *,
        model: str = "fake",
        tokenizer: str = "bytes",
        max_model_len: int = 512,
        pool: int = 4096,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.engine_id = f"{role}-{next(self._serial)}"
        self.role: beats.Role = role
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.pool = pool
        self.identity = dict(identity or {"model": model, "kv_dtype": "float32"})
        self.handovers = handovers or Handovers()
        self.cached_tokens = 0
        self.on_prefill: PrefillWork = prompt_prefill
        self.on_decode: DecodeWork = echo_decode
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        self.decodes: list[decode_pb2.DecodeRequest] = []
        self.metadata: list[dict[str, str]] = []
        """Of each call."""
        self.open_calls = 0
        self.idle = asyncio.Event()
        """No call is open."""
        self.idle.set()
        self.address = ""
        self._signer = signer
        self._beats = itertools.count(1)
        self._clock = Clock()
        self._server: grpc.aio.Server | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)

    async def start(self, port: int = 0) -> None:
        """Serves on loopback."""
        self._server = grpc.aio.server(
            options=list(SERVER_OPTIONS), interceptors=[ErrorInterceptor(lambda method, error: None)]
        )
        prefill_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self), self._server)
        decode_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def register(self, proxy: str, **changes: Any) -> beats.Reply:
        """Sends one beat to the proxy's registration address and returns its answer."""
        host, port = split_address(proxy)
        self._socket.connect(f"tcp://{host}:{port}")
        return await self.beat(**changes)

    async def beat(self, **changes: Any) -> beats.Reply:
        """Sends one more beat, with these fields changed."""
        fields: dict[str, Any] = {
            "type": "P" if self.role == "prefill" else "D",
            "http_address": self.address,
            "zmq_address": "host:127.0.0.1,handshake:0,notify:0",
            "dp_size": 1,
            "tp_size": 1,
            "transfer_mode": "READ",
            "engine_id": self.engine_id,
            "grpc_address": self.address,
            "locator": b"locator of " + self.engine_id.encode(),
            "model": self.model,
            "tokenizer": self.tokenizer,
            "role": self.role,
            "identity": self.identity,
            "max_model_len": self.max_model_len,
            "block_size": 16,
            "total_kv_tokens": self.pool,
            "free_kv_tokens": self.pool,
            "running": 0,
            "waiting": 0,
            "steps": 0,
            "state": "ready",
            "beat": next(self._beats),
            "sent_at": self._clock.unix(),
            "vocab_size": 258,
        }
        await self._socket.send(beats.encode(beats.Beat(**(fields | changes)), self._signer))
        return beats.decode_reply(await asyncio.wait_for(self._socket.recv(), 5.0))

    def stamps(self, *points: int) -> common_pb2.Stamps:
        """These cut points, all now."""
        now = self._clock.monotonic_ns()
        stamps = [common_pb2.Stamp(point=common_pb2.CutPoint.ValueType(point), monotonic_ns=now) for point in points]
        return common_pb2.Stamps(boot_id=boot_id(), stamps=stamps)

    async def stop(self) -> None:
        """Hangs up at once, as a killed process does; safe twice."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self._socket.close()
        self._context.term()

    async def serve(self, work: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Runs a call's work and counts it while it is open."""
        self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata() or ()})
        self.open_calls += 1
        self.idle.clear()
        context.add_done_callback(self._closed)
        async for message in work:
            yield message

    def _closed(self, _: Any) -> None:
        self.open_calls -= 1
        if not self.open_calls:
            self.idle.set()


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self._engine.prefills.append(request)
        async for message in self._engine.serve(self._engine.on_prefill(self._engine, request), context):
            yield message


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        self._engine.decodes.append(request)
        async for message in self._engine.serve(self._engine.on_decode(self._engine, request), context):
            yield message


def _logprobs(letter: str, top: int) -> common_pb2.PositionLogprobs:
    sampled = common_pb2.TokenLogprob(token_id=ord(letter), token=letter, logprob=-0.25)
    others = [common_pb2.TokenLogprob(token_id=i, token=chr(65 + i), logprob=-1.0 - i) for i in range(top - 1)]
    return common_pb2.PositionLogprobs(sampled=sampled, top=[sampled, *others][:top])
