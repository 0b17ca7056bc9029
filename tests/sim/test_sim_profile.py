"""A deployment of simulated engines whose steps take a known time is measured: the fit finds the constants again."""

import asyncio
import random
from typing import Any

import pytest

from pdserve.costmodel import CostModel
from pdserve.planner.measuring import fits
from pdserve.planner.measuring.design import Design
from pdserve.planner.measuring.live import measure
from pdserve.planner.measuring.points import Measured
from pdserve.rpc.errors import ConfigError, PdserveError
from tests.sim.fleet import Fleet, Launch

COST = CostModel(
    prefill_base=0.020,
    prefill_per_token=0.10e-3,
    decode_base=0.012,
    decode_per_seq=0.006,
    decode_per_context_token=0.02e-3,
    mixed_base=0.015,
    mixed_per_token=0.12e-3,
)
"""Milliseconds in the tens: what the event loop adds to a step is small beside it."""
DESIGN = Design(prompts=(64, 200, 500), batches=(1, 2, 4), contexts=(16, 300), answer=10, repeats=2)
OFF = 0.2
"""Relative: a busy machine's sleeps are too long, never too short."""
TRIES = 6
STEP_S = 5e-3
"""What a simulated step takes beside its sleep: checking KV, the event loop. It is measured with it."""


def far(cost: CostModel, names: tuple[str, ...]) -> list[str]:
    """Which of the named constants did not come out, and which steps of the design are far off."""
    print(cost)
    allowed = {name: STEP_S if name.endswith("base") else 0.0 for name in names}
    off = [n for n in names if getattr(cost, n) != pytest.approx(getattr(COST, n), rel=OFF, abs=allowed[n])]
    steps = ((64, 0, 0), (500, 0, 0), (0, 1, 30), (0, 4, 64), (0, 4, 1240))
    return off + [str(s) for s in steps if cost.step_time(*s) != pytest.approx(COST.step_time(*s), rel=OFF)]


async def measured_well(fleet: Fleet, rng: random.Random, names: tuple[str, ...]) -> tuple[Measured, fits.Fitted]:
    """What is measured, and its fit, which has the named constants. The best of a few, as the box may be busy: a fit
    that is wrong is so each time."""
    for _ in range(TRIES):
        measured = await measure(fleet.client, DESIGN, rng)
        fitted = fits.fit(measured)
        if not (off := far(fitted.cost, names) + fits.misfits(fitted)):
            return measured, fitted
    raise AssertionError(off)


async def test_pair_is_measured(launch: Launch, rng: random.Random) -> None:
    """Of a prefill and a decode engine: both lines, the bytes of a token, the pools; nothing of mixed steps."""
    fleet = await launch(cost=COST, prefix_cache=False)
    measured, fitted = await measured_well(fleet, rng, ("prefill_base", "decode_base", "decode_per_seq"))
    assert fitted.mixed_assumed
    assert (fitted.cost.mixed_base, fitted.cost.mixed_per_token) == (0.0, fitted.cost.prefill_per_token)
    assert fitted.handover is not None
    sim = fleet.sim
    # Whole blocks are moved, so that a token costs a little more than its share of one.
    share = sim.block_bytes * sim.layers / sim.block_size
    assert share <= fitted.handover.bytes_per_token <= 1.2 * share
    assert set(fitted.handover.tail) == {"read", "write"}
    assert fitted.handover.layers == sim.layers
    assert measured.kv_tokens == sim.num_blocks * sim.block_size
    assert measured.max_model_len == sim.max_model_len


async def test_engine_alone_is_measured(launch: Launch, rng: random.Random) -> None:
    """Of an engine that serves whole requests: steps that carry a prompt beside a batch as well, and no hand-over."""
    fleet = await launch(prefills=0, decodes=0, cost=COST, prefix_cache=False)
    await fleet.host("both", kvd=False)
    names = ("prefill_base", "decode_base", "decode_per_seq", "mixed_base", "mixed_per_token")
    _, fitted = await measured_well(fleet, rng, names)
    assert not fitted.mixed_assumed
    assert fitted.handover is None


REFUSED: list[tuple[Design, str]] = [
    (Design(prompts=(64, 5000)), "more than the model's context"),
    (Design(batches=(1, 64), contexts=(16, 300)), "too much for a pool"),
    (Design(model="other"), "name one of the deployment's models with --model: sim"),
]


@pytest.mark.parametrize(("design", "why"), REFUSED, ids=["context", "pool", "model"])
async def test_what_cannot_be_measured_is_refused(fleet: Fleet, rng: random.Random, design: Design, why: str) -> None:
    """A design that does not fit the deployment is refused before a request is sent."""
    with pytest.raises(ConfigError, match=why):
        await measure(fleet.client, design, rng)
    assert not fleet.ended()


async def test_busy_deployment_is_refused(fleet: Fleet, rng: random.Random, prompt: Any) -> None:
    """While the deployment answers somebody else, a measurement would be of both."""
    fleet.decodes[0].steps.shut()
    asking = asyncio.create_task(fleet.ask(prompt(20), mode="read"))
    await fleet.until(lambda: fleet.proxy.inference.topology().in_flight > 0)
    with pytest.raises(ConfigError, match="serves 1 other requests"):
        await measure(fleet.client, DESIGN, rng)
    fleet.decodes[0].steps.open()
    await asking


async def test_measurement_that_breaks_off_gives_what_it_has(launch: Launch, rng: random.Random) -> None:
    """The only decode engine dies when the first batch is to be measured: the prompts that were measured are there, and
    why there is no more. Where it dies before the first, that is the error."""
    fleet = await launch(cost=COST, prefix_cache=False)
    killing: list[asyncio.Task[None]] = []

    def say(line: str) -> None:
        if "sequences at" in line and not killing:
            killing.append(asyncio.create_task(fleet.kill(fleet.decodes[0])))

    measured = await measure(fleet.client, DESIGN, rng, say)
    await killing[0]
    assert len(measured.prefill) == len(DESIGN.prompts)
    assert measured.decode == ()
    print(measured.broke_off)
    assert measured.broke_off.endswith("(ENGINE_DIED)") or measured.broke_off.endswith("(NO_ENGINES)")
    with pytest.raises(PdserveError):
        await measure(fleet.client, DESIGN, rng)
