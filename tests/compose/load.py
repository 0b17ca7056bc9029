"""Streams at a steady rate, each judged: gRPC and HTTP in turn, READ and WRITE in turn, and nothing is sent twice."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from pdserve.client import AsyncClient, PdserveError, Retry

TOKENS = 64
_WAIT_S = 60.0


@dataclass(slots=True)
class Seen:
    """What the clients have seen."""

    begun: int = 0
    """Streams; they are numbered from 0."""
    under_way: set[int] = field(default_factory=set)
    whole: int = 0
    """Answers with all of their tokens."""
    errors: list[str] = field(default_factory=list)
    _change: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def running(self, count: int) -> None:
        """Returns when so many streams are under way.

        Raises:
            TimeoutError: they are not.
        """
        async with asyncio.timeout(_WAIT_S), self._change:
            await self._change.wait_for(lambda: len(self.under_way) >= count)

    async def through(self, further: int) -> None:
        """Returns when so many streams more have begun, and all that had by then have ended.

        Raises:
            TimeoutError: they do not.
        """
        last = self.begun + further
        async with asyncio.timeout(_WAIT_S), self._change:
            await self._change.wait_for(lambda: self.begun >= last and min(self.under_way, default=last) >= last)

    async def begin(self, number: int) -> None:
        """A stream begins."""
        async with self._change:
            self.begun = number + 1
            self.under_way.add(number)
            self._change.notify_all()

    async def end(self, number: int, error: str) -> None:
        """A stream has ended, whole where there is no error."""
        async with self._change:
            self.under_way.remove(number)
            if error:
                self.errors.append(error)
            else:
                self.whole += 1
            self._change.notify_all()


@contextlib.asynccontextmanager
async def streams(grpc: int, http: int, rate: float) -> AsyncIterator[Seen]:
    """Begins `rate` streams a second while the block runs; at its end waits for those under way."""
    seen, stop = Seen(), asyncio.Event()
    # A client that tries again hides what this is to show.
    async with AsyncClient(f"127.0.0.1:{grpc}", retry=Retry(attempts=1)) as client, aiohttp.ClientSession() as session:

        async def over_grpc(prompt: str, mode: str) -> int:
            stream = client.stream(prompt, max_tokens=TOKENS, mode="write" if mode == "write" else "read")
            async for _ in stream:
                pass
            return (await stream.completion()).usage.completion_tokens

        async def over_http(prompt: str, mode: str) -> int:
            ask = {"model": "sim", "prompt": prompt, "max_tokens": TOKENS, "stream": True, "pdserve": {"mode": mode}}
            ask["stream_options"] = {"include_usage": True}
            tokens = 0
            async with session.post(f"http://127.0.0.1:{http}/v1/completions", json=ask) as response:
                if response.status != 200:
                    raise PdserveError(f"{response.status}: {await response.text()}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise PdserveError(str(event["error"]))
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            return tokens

        async def one(number: int) -> None:
            ask = over_grpc if number % 2 else over_http
            await seen.begin(number)
            try:
                tokens = await ask(f"{number} " * (20 + number % 7), "read" if number % 4 < 2 else "write")
            except (PdserveError, aiohttp.ClientError) as error:
                wrong = f"{ask.__name__} {number}: {type(error).__name__}: {error}"
            else:
                wrong = "" if tokens == TOKENS else f"{ask.__name__} {number}: {tokens} tokens of {TOKENS}"
            await seen.end(number, wrong)

        async def begin() -> None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with asyncio.TaskGroup() as group:
                for number in itertools.count():
                    group.create_task(one(number))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(began + (number + 1) / rate):
                            await stop.wait()
                    if stop.is_set():
                        return

        beginning = asyncio.create_task(begin())
        try:
            yield seen
        finally:
            stop.set()
            await beginning
