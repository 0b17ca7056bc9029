"""Measures a running deployment through its proxy, turn by turn. Nothing else may run on it meanwhile."""

import random
from collections.abc import Callable, Sequence

from pdserve.client import AsyncClient
from pdserve.planner.measuring.asking import Found, Rig
from pdserve.planner.measuring.design import Design
from pdserve.planner.measuring.points import (
    Measured,
)
from pdserve.rpc.errors import ConfigError, PdserveError


async def measure(
    client: AsyncClient, design: Design, rng: random.Random, say: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measures what the deployment behind `client` has: a pair, an engine that serves whole requests, or both.

    `rng` makes the prompts: equal seeds on one deployment find them in its prefix cache; such answers count as what
    was really computed.

    Where a request fails, what was measured until then is returned, with why it broke off.

    Raises:
        ConfigError: nothing to measure, or the deployment serves others, or its pools or context are too small.
        PdserveError: a request failed before anything was measured.
    """
    topology = await client.topology()
    model, longest = await _model(client, design.model)
    rig = Rig(client, design, rng, model, topology)
    rig.check(longest)
    found, broke_off = Found(), ""
    try:
        for turn in range(design.repeats):
            await _turn(turn, rig, design, rng, found, say)
    except ConfigError:
        raise
    except PdserveError as error:
        if not found.prefill:
            raise
        broke_off = f"{error.message} ({error.reason})"
    return Measured(
        model=model,
        prefill=tuple(found.prefill),
        decode=tuple(found.decode),
        mixed=tuple(found.mixed),
        handovers=tuple(found.handovers),
        edges=tuple(found.edges),
        kv_tokens=rig.pool("decode"),
        prefill_kv_tokens=rig.pool("prefill"),
        max_model_len=longest,
        token_budget=design.token_budget,
        broke_off=broke_off,
    )


async def _turn(
    turn: int, rig: Rig, design: Design, rng: random.Random, found: Found, say: Callable[[str], None]
) -> None:
    """Everything once."""
    said = f"turn {turn + 1} of {design.repeats}"
    for tokens in _shuffled(design.prompts, rng):
        say(f"{said}: a prompt of {tokens} tokens")
        await rig.prompt(tokens, found)
    # The first turn begins with the smallest batch: it tells how long the answers of larger ones have to be.
    for batch in sorted(design.batches) if turn == 0 else _shuffled(design.batches, rng):
        for context in design.contexts:
            say(f"{said}: {batch} sequences at {context} tokens of context")
            points = await rig.decode(batch, context)
            if not points:
                say(f"  {batch} sequences did not decode side by side for long enough: left out")
            found.decode += points
    if rig.alone:
        for tokens in _shuffled(design.prompts, rng):
            say(f"{said}: a prompt of {tokens} tokens beside a batch")
            found.mixed += await rig.mixed(max(design.batches) // 2 or 1, tokens)


async def _model(client: AsyncClient, wanted: str) -> tuple[str, int]:
    models = await client.list_models()
    chosen = [model for model in models if not wanted or model.id == wanted]
    if len(chosen) != 1:
        names = ", ".join(model.id for model in models) or "none"
        raise ConfigError(f"profile: name one of the deployment's models with --model: {names}")
    return chosen[0].id, chosen[0].max_model_len


def _shuffled(values: Sequence[int], rng: random.Random) -> list[int]:
    return rng.sample(list(values), len(values))
