"""Asks a proxy from inside a namespace: `python ask.py ADDRESS` reads lines of JSON, each a number and calls that are
made at once, and prints a line with that number and their answers, in their order."""

import asyncio
import json
import sys
from typing import Any

from pdserve.client import AsyncClient, Retry
from pdserve.rpc.errors import PdserveError


async def ask(client: AsyncClient, call: dict[str, Any]) -> dict[str, Any]:
    """Its `prompt` are token ids, the rest goes to `generate`."""
    said: dict[str, Any] = {"prompt": call["prompt"]}
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "timeout": 60.0, "on_failure": "fail"} | call
    try:
        answer = await client.generate(how.pop("prompt"), **how)
    except PdserveError as error:
        return said | {"reason": error.reason, "error": error.message}
    said |= {"tokens": list(answer.token_ids), "kv_bytes": answer.kv_bytes, "transport": answer.transport}
    said |= {"prefill": answer.prefill_engine_id}
    return said | {"mode": answer.mode, "recomputed": answer.recomputed_tokens, "fallbacks": answer.fallbacks}


async def main(address: str) -> None:
    """Until its input ends."""
    async with AsyncClient(address, retry=Retry(attempts=1)) as client, asyncio.TaskGroup() as asking:

        async def all_of(number: int, calls: list[dict[str, Any]]) -> None:
            answers = await asyncio.gather(*(ask(client, call) for call in calls))
            print(json.dumps([number, answers]), flush=True)

        while line := await asyncio.to_thread(sys.stdin.readline):
            asking.create_task(all_of(*json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
