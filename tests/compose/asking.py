"""One request of either face, READ or WRITE, whose KV must have been handed over through kvd's shared memory."""

import aiohttp

from pdserve.client import AsyncClient, Retry
from tests.compose.deployment import Deployment

MODES = ("read", "write")


async def answer_over_grpc(deployment: Deployment, mode: str) -> str:
    """Asks for an answer and checks it; its trace id."""
    async with AsyncClient(f"127.0.0.1:{deployment.grpc}", retry=Retry(attempts=1)) as client:
        done = await client.generate("hello " * 40, max_tokens=8, mode="write" if mode == "write" else "read")
    assert done.usage.completion_tokens == 8
    assert done.mode == mode
    assert done.transfer is not None, "the prompt's KV was handed over"
    assert done.transfer.transport == "shm"
    assert (done.fallbacks, done.recomputed_tokens) == (0, 0)
    return done.trace_id


async def answer_over_http(deployment: Deployment, mode: str) -> None:
    """The same with OpenAI's API."""
    ask = {"model": "sim", "prompt": "hello " * 40, "max_tokens": 8, "pdserve": {"mode": mode}}
    url = f"http://127.0.0.1:{deployment.http}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=ask) as response:
        said = await response.json()
    assert response.status == 200, said
    assert said["usage"]["completion_tokens"] == 8
    assert (said["pdserve"]["mode"], said["pdserve"]["transfer"]["transport"]) == (mode, "shm")
