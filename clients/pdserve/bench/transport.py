"""Which transport hands the KV cache over, asked before anything is measured; a silent fallback is refused."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdserve.bench.endpoint import Asking, Endpoint, Outcome, Trail
from pdserve.bench.results import Record
from pdserve.rpc.errors import ConfigError, DeadlinePassed

SLOW_COPIER = "python"
"""kvd's copy loop where the installation could not compile one: about half the speed."""
FALLBACKS = frozenset({"memmove", SLOW_COPIER})
"""What a deployment falls back to; nobody chooses them."""

PROBE_TOKENS = 256
"""Prompt of the probe: at least one whole block of every engine that we know of, so that something is handed over."""
ANSWER_TOKENS = 2
"""Of the probe's answer: with one there would be no decode step behind the hand-over."""


@dataclass(frozen=True, slots=True)
class KvdFacts:
    """What a node's kvd says of its transports."""

    transports: tuple[str, ...]
    """Those that work, in order of preference."""
    copier: str
    """How host memory is copied: `compiled`, or `python`."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the user has said about the transport."""

    transport: str = ""
    """What has to move the KV cache; empty: anything but a fallback."""
    allowed: Collection[str] = ()
    """Fallbacks that are accepted."""


async def probe(endpoint: Endpoint, prompt: str | list[int], timeout: float) -> Outcome:
    """Asks one short question, as the run will ask, and returns how it was answered.

    Raises:
        PdserveError: it was not answered.
    """
    send = endpoint.prepare(prompt, ANSWER_TOKENS)
    try:
        async with asyncio.timeout(timeout):
            return await send(Trail())
    except TimeoutError:
        raise DeadlinePassed(f"the probe was not answered within {timeout:g} s") from None


def judge(outcome: Outcome, asking: Asking, kvd: KvdFacts | None, expected: Expected) -> str:
    """The transport of a probe's answer, "" where nothing was handed over or nobody said.

    Raises:
        ConfigError: it is a fallback that was not allowed, is not the one that was expected, or the request was not
            answered in the mode that was asked for.
    """
    used = outcome.transport
    if asking.mode and outcome.mode != asking.mode:
        how = f"was answered in mode {outcome.mode}" if outcome.mode else "was answered without a hand-over"
        raise ConfigError(f"the probe asked for mode {asking.mode} and {how}: this is not what is to be measured")
    if outcome.fallbacks:
        raise ConfigError(
            f"the probe left the path that it began on {outcome.fallbacks} times before its first token: "
            "the deployment is not well; `pdserve status` says more"
        )
    for name in (used, kvd.copier if kvd and used else ""):
        if not _allowed(name, expected):
            slow = "kvd copies with its Python loop" if name == SLOW_COPIER else f"the KV cache moved over {name}"
            raise ConfigError(f"{slow}, which is a fallback: repair it, or say --allow-transport {name}")
    if expected.transport and used != expected.transport:
        told = f"moved over {used}" if used else "was not handed over, or the endpoint does not say how"
        raise ConfigError(f"--expect-transport {expected.transport}, but the KV cache {told}")
    return used


def refused(records: Sequence[Record], expected: Expected) -> str:
    """What the answers of a run say against it, by the rules of the probe; empty: nothing.

    A probe speaks for its own moment: kvd may have fallen back since. An answer without a hand-over is no fallback of
    the transport, and is not judged.
    """
    used = Counter(record.transport for record in records if record.error is None and record.transport)
    for name, count in sorted(used.items()):
        of = f"{count} of {sum(used.values())} KV caches moved over {name}"
        if not _allowed(name, expected):
            return f"{of}, which is a fallback: repair it, or say --allow-transport {name}"
        if expected.transport and name != expected.transport:
            return f"{of}, not over {expected.transport}"
    return ""


def _allowed(name: str, expected: Expected) -> bool:
    return name not in FALLBACKS or name in expected.allowed
