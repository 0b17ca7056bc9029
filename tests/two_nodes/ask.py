"""Asks a proxy from inside a namespace: `python ask.py ADDRESS MODE TOKENS COUNT SEED` prints a JSON line an answer."""

import asyncio
import json
import random
import sys
from typing import Literal

from pdserve.client import AsyncClient, Retry
from pdserve.rpc.errors import PdserveError


async def main(address: str, mode: Literal["read", "write"], tokens: int, count: int, seed: int) -> None:
    """All at once."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(tokens)] for _ in range(count)]

    async with AsyncClient(address, retry=Retry(attempts=1)) as client:

        async def ask(prompt: list[int]) -> None:
            said: dict[str, object] = {"prompt": prompt}
            try:
                answer = await client.generate(
                    prompt, mode=mode, max_tokens=8, temperature=0.0, timeout=60.0, on_failure="fail"
                )
                said |= {"tokens": list(answer.token_ids), "kv_bytes": answer.kv_bytes}
            except PdserveError as error:
                said |= {"reason": error.reason, "error": error.message}
            print(json.dumps(said), flush=True)

        await asyncio.gather(*(ask(prompt) for prompt in prompts))


if __name__ == "__main__":
    where, how, *numbers = sys.argv[1:]
    asyncio.run(main(where, "write" if how == "write" else "read", *(int(number) for number in numbers)))
