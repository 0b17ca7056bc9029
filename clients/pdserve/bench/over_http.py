"""Any OpenAI completions endpoint, over HTTP with server-sent events."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp
import msgspec

from pdserve.bench.endpoint import Asking, Clock, Described, Outcome, Send, Trail, pick
from pdserve.bench.sse import Events, Usage, refusal
from pdserve.rpc.errors import ConfigError, PdserveError, Unavailable

_LINE = 1 << 20
"""Bytes of a header line and of a read; an answer's last event may be long."""


class HttpEndpoint:
    """See Endpoint. Where OPENAI_API_KEY is set it is sent along, as OpenAI's clients do."""

    def __init__(self, session: aiohttp.ClientSession, base: str, asking: Asking, clock: Clock) -> None:
        """Use `open`."""
        self._session = session
        self._base = base
        self._asking = asking
        self._clock = clock

    @classmethod
    async def open(cls, url: str, asking: Asking, clock: Clock = time.monotonic) -> Self:
        """`url` with or without its `/v1`; connects at the first call.

        Raises:
            ConfigError: it is no HTTP URL.
        """
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL of an endpoint: http://HOST:PORT")
        key = os.environ.get("OPENAI_API_KEY")
        session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # No limit of connections: a request that waits for one would not be sent when it is due.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE,
        )
        return cls(session, base, asking, clock)

    async def describe(self, timeout: float) -> Described:
        """See Endpoint."""
        where = f"{self._base}/v1/models"
        try:
            async with self._session.get(where, timeout=aiohttp.ClientTimeout(total=timeout)) as answer:
                if answer.status != 200:
                    raise await _refused(answer)
                body = msgspec.json.decode(await answer.read())
            models = {str(model["id"]): _length(model) for model in body["data"]}
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _broken(self._base, error) from error
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise Unavailable(
                f"{where} does not answer as OpenAI's API does: {error!r}", reason="BAD_ANSWER"
            ) from error
        name, longest = pick(models, self._asking.model, self._base)
        self._asking = dataclasses.replace(self._asking, model=name)  # not every endpoint lets it be left out
        return Described(name, longest)

    def prepare(self, prompt: str | Sequence[int], output_tokens: int) -> Send:
        """See Endpoint. What counts as a chunk is what does in `vllm bench serve`: an event with a choice."""
        body = self._body(prompt, output_tokens)

        async def send(trail: Trail) -> Outcome:
            try:
                return await self._send(body, trail)
            except (aiohttp.ClientError, OSError) as error:
                raise _broken(self._base, error) from error

        return send

    async def aclose(self) -> None:
        """See Endpoint."""
        await self._session.close()

    def _body(self, prompt: str | Sequence[int], output_tokens: int) -> bytes:
        asking = self._asking
        body: dict[str, Any] = {
            "model": asking.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if asking.temperature is not None:
            body["temperature"] = asking.temperature
        if asking.ignore_eos:
            body["ignore_eos"] = True
        if extra := {name: value for name in ("mode", "route") if (value := getattr(asking, name))}:
            body["pdserve"] = extra
        return msgspec.json.encode(body)

    async def _send(self, body: bytes, trail: Trail) -> Outcome:
        clock = self._clock
        events = Events()
        usage: Usage | None = None
        facts: dict[str, Any] = {}
        trail.sent = clock()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{self._base}/v1/completions", data=body, headers=headers) as answer:
            if answer.status != 200:
                raise await _refused(answer)
            async for data in answer.content.iter_any():
                now = clock()
                for chunk in events.feed(data):
                    if chunk.choices:
                        trail.chunks.append(now)
                    usage = chunk.usage or usage
                    facts = chunk.pdserve or facts
        if not events.done:
            raise Unavailable("the stream ended before its end", reason="STREAM_ENDED")
        return _outcome(usage, facts, len(trail.chunks))


def _outcome(usage: Usage | None, facts: Mapping[str, Any], chunks: int) -> Outcome:
    """`facts` are the `pdserve` object of a pdserve proxy; elsewhere there is none."""
    timings: Mapping[str, Any] = facts.get("timings") or {}
    details = usage.prompt_tokens_details if usage else None
    return Outcome(
        output_tokens=usage.completion_tokens if usage else chunks,
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        mode=facts.get("mode") or "",
        transport=(facts.get("transfer") or {}).get("transport", ""),
        parts=dict(timings.get("parts") or {}),
        unattributed=float(timings.get("unattributed_seconds") or 0.0),
        fallbacks=int(facts.get("fallbacks") or 0),
    )


def _length(model: Mapping[str, Any]) -> int | None:
    value = model.get("max_model_len")  # vLLM's and pdserve's
    return value if isinstance(value, int) and value > 0 else None


async def _refused(answer: aiohttp.ClientResponse) -> PdserveError:
    data = await answer.read()
    try:
        return refusal(answer.status, msgspec.json.decode(data))
    except msgspec.DecodeError:
        return refusal(answer.status, data[:200].decode("utf-8", "replace") or answer.reason)


def _broken(base: str, error: Exception) -> PdserveError:
    return Unavailable(f"{base}: {error or type(error).__name__}")
