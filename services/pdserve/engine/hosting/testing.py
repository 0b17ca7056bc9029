"""Shipped test doubles: an engine that says what a test tells it to, and a kvd that does nothing.

Both keep their ports' contracts: a run ends once, an abort is seen, an end comes once.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Self

from pdserve.engine.port import EngineInfo, Finish, Load, Output, Produce, Request
from pdserve.kvd.client.messages import End, Facts, Outcome
from pdserve.rpc.errors import DeadlinePassed, EngineDied, KvdUnavailable, PdserveError, TransferUsed

INFO = EngineInfo(
    engine_id="scripted",
    model="scripted",
    tokenizer="bytes",
    max_model_len=256,
    block_size=16,
    num_blocks=64,
    ranks=1,
    identity={"model": "scripted", "block_size": "16"},
    vocab_size=258,
    eos_token_ids=(257,),
)


class Run:
    """One request at a ScriptedEngine: the test says its outputs."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.aborted = asyncio.Event()
        """Set when the service closed the stream before its end."""
        self.ended = asyncio.Event()
        """Set when the stream is over, for whatever reason."""
        self._script: asyncio.Queue[Output | PdserveError] = asyncio.Queue()

    def say(self, *outputs: Output) -> Self:
        """Sends outputs; one with a finish reason ends the run."""
        for output in outputs:
            self._script.put_nowait(output)
        return self

    def fail(self, error: PdserveError) -> Self:
        """Ends the run with an error."""
        self._script.put_nowait(error)
        return self

    def answer(self, token_ids: Sequence[int], **fields: int) -> Self:
        """One output with all tokens, ended by length; a producer offers its whole prompt."""
        last = Output(token_ids=tuple(token_ids), text="".join(map(chr, token_ids)), finish=Finish.LENGTH)
        if isinstance(self.request.kv, Produce):
            prompt = len(self.request.prompt)
            last = replace(last, offered_tokens=prompt, offered_blocks=-(-prompt // INFO.block_size))
        return self.say(replace(last, **fields))  # type: ignore[arg-type]  # the test names int fields

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """What the engine yields."""
        done = False
        try:
            while not done:
                event = await self._script.get()
                done = isinstance(event, PdserveError) or event.finish is not None
                if isinstance(event, PdserveError):
                    raise event
                yield event
        finally:
            if not done:
                self.aborted.set()
            self.ended.set()


class ScriptedEngine:
    """An Engine whose runs are handed to the test as they begin."""

    def __init__(self, info: EngineInfo = INFO) -> None:
        self._info = info
        self._begun: asyncio.Queue[Run] = asyncio.Queue()
        self.runs: list[Run] = []
        self.load_now = Load(free_kv_tokens=1024, total_kv_tokens=1024, running=0, waiting=0, steps=0)
        self.closed = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def info(self) -> EngineInfo:
        """See Engine."""
        return self._info

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See Engine."""
        if self._death.done():
            raise EngineDied(self._death.result())
        run = Run(request)
        self.runs.append(run)
        self._begun.put_nowait(run)
        outputs = run.outputs()
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def next_run(self, timeout: float = 5.0) -> Run:
        """The next run that begins, in order."""
        async with asyncio.timeout(timeout):
            return await self._begun.get()

    def load(self) -> Load:
        """See Engine."""
        return self.load_now

    def die(self, reason: str) -> None:
        """Makes `failed` return, and every later run fail."""
        self._death.set_result(reason)

    async def failed(self) -> str:
        """See Engine."""
        return await asyncio.shield(self._death)

    async def aclose(self) -> None:
        """See Engine."""
        self.closed = True


class ScriptedWatch:
    """See pdserve.engine.hosting.handoffs.Watch."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.closed = False

    @property
    def result(self) -> End | None:
        """See Watch."""
        return self.ended.result() if self.ended.done() else None

    async def end(self, timeout: float) -> End:
        """See Watch."""
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self.ended)
        except TimeoutError:
            raise DeadlinePassed(f"no end in {timeout:g} s") from None

    def close(self) -> None:
        """See Watch."""
        self.closed = True


class ScriptedHandoffs:
    """A kvd that moves nothing: the test says the ends."""

    def __init__(self) -> None:
        self.watches: dict[tuple[bytes, int | None], ScriptedWatch] = {}
        self.cancelled: list[tuple[bytes, str]] = []
        self.cancelled_once = asyncio.Event()
        """Set by the first cancel."""
        self.away = False
        """Whether kvd cannot be reached."""

    def register(self, transfer_id: bytes, consumer: int | None) -> ScriptedWatch:
        """See Handoffs."""
        if self.away:
            raise KvdUnavailable("no kvd")
        if (transfer_id, consumer) in self.watches:
            raise TransferUsed("watched already")
        watch = self.watches[(transfer_id, consumer)] = ScriptedWatch()
        return watch

    def cancel(self, transfer_id: bytes, reason: str) -> None:
        """See Handoffs."""
        self.cancelled.append((transfer_id, reason))
        self.cancelled_once.set()

    def end(
        self,
        transfer_id: bytes,
        consumer: int | None,
        outcome: Outcome,
        reason: str = "",
        facts: Facts | None = None,
    ) -> None:
        """Delivers the one end of a watched transfer."""
        end = End(
            handle="handle",
            transfer_id=transfer_id,
            outcome=outcome,
            reason=reason,
            detail="" if outcome.good else "so the test said",
            facts=facts or Facts(),
            producer=consumer is None,
            consumer=consumer or 0,
        )
        self.watches[(transfer_id, consumer)].ended.set_result(end)
