"""A pdserve proxy as an endpoint, through the SDK over gRPC."""

import time
from collections.abc import Sequence
from typing import Any

from pdserve.bench.endpoint import Asking, Clock, Described, Outcome, Send, Trail, pick
from pdserve.bench.results import EngineFacts
from pdserve.client import AsyncClient, Completion, Retry


class GrpcEndpoint:
    """See Endpoint. Every request is sent once: a request sent again would be measured as a slow one."""

    def __init__(self, target: str, asking: Asking, clock: Clock = time.monotonic) -> None:
        """Connects at the first call."""
        self._target = target
        self._asking = asking
        self._clock = clock
        self._client = AsyncClient(target, retry=Retry(attempts=1))

    async def describe(self, timeout: float) -> Described:
        """See Endpoint."""
        models = {m.id: m.max_model_len or None for m in await self._client.list_models(timeout=timeout)}
        name, longest = pick(models, self._asking.model, self._target)
        topology = await self._client.topology(timeout=timeout)
        return Described(name, longest, tuple(EngineFacts(e.engine_id, e.role) for e in topology.engines))

    def prepare(self, prompt: str | Sequence[int], output_tokens: int) -> Send:
        """See Endpoint. A delta with several tokens counts as one chunk, one without tokens as none."""
        asking = self._asking
        # The values are checked where the command line is read, so their words are the SDK's.
        fields: dict[str, Any] = {
            "model": asking.model,
            "mode": asking.mode or None,
            "route": asking.route or None,
            "max_tokens": output_tokens,
            "ignore_eos": asking.ignore_eos,
            "temperature": asking.temperature,
            "timeout": asking.timeout,
        }
        stream = self._client.stream(prompt, **fields)
        clock = self._clock

        async def send(trail: Trail) -> Outcome:
            async with stream:
                trail.sent = clock()
                async for delta in stream:
                    if delta.token_ids:
                        trail.chunks.append(clock())
                return _outcome(await stream.completion())

        return send

    async def aclose(self) -> None:
        """See Endpoint."""
        await self._client.aclose()


def _outcome(done: Completion) -> Outcome:
    return Outcome(
        output_tokens=done.usage.completion_tokens,
        prompt_tokens=done.usage.prompt_tokens,
        cached_tokens=done.usage.cached_tokens,
        mode=done.mode or "",
        transport=done.transport,
        parts=dict(done.timings.parts),
        unattributed=done.timings.unattributed_seconds,
        fallbacks=done.fallbacks,
    )
