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


@dataclass(slots=True)
class Seen:
    """What the clients have seen."""

    whole: int = 0
    """Answers with all of their tokens."""
    errors: list[str] = field(default_factory=list)


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
            try:
                tokens = await ask(f"{number} " * (20 + number % 7), "read" if number % 4 < 2 else "write")
            except (PdserveError, aiohttp.ClientError) as error:
                seen.errors.append(f"{ask.__name__} {number}: {type(error).__name__}: {error}")
            else:
                if tokens == TOKENS:
                    seen.whole += 1
                else:
                    seen.errors.append(f"{ask.__name__} {number}: {tokens} tokens of {TOKENS}")

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
