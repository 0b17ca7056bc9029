"""The fit behind `pdserve profile`: known constants come back, stalls do not move them, a misfit is said."""

import dataclasses
import math
import random

import pytest

from pdserve.costmodel import CostModel
from pdserve.planner.measuring import fits, lines, making, points, steps
from pdserve.planner.measuring.points import (
    DecodePoint,
    EdgePoint,
    HandoverPoint,
    Measured,
    MixedPoint,
    PrefillPoint,
)
from pdserve.planner.measuring.steps import Answer
from pdserve.planner.measuring.table import table
from pdserve.planner.simulator import Job, Mode, simulate
from pdserve.rpc.errors import ConfigError

SEED = 20
COST = CostModel(0.05, 0.2e-3, 0.02, 0.4e-3, 0.3e-6, 0.01, 0.25e-3)
PROMPTS = (32, 64, 128, 256, 512, 1024)


def measured(noise: float = 0.02, stalls: float = 0.0, cost: CostModel = COST) -> Measured:
    """A deployment of that cost; each time is off by up to `noise`, a share of them is two to five times as long."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")

    def of(seconds: float) -> float:
        seconds *= 1 + rng.uniform(-noise, noise)
        return seconds * rng.uniform(2, 5) if rng.random() < stalls else seconds

    prefill = [PrefillPoint(n, of(cost.step_time(n, 0, 0))) for n in PROMPTS for _ in range(4)]
    decode = [
        DecodePoint(batch, batch * context, of(cost.step_time(0, batch, batch * context)))
        for batch in (1, 2, 4, 8, 32)
        for context in (16, 512, 4000)
        for _ in range(2)
    ]
    mixed = [MixedPoint(n, 4, 400, of(cost.step_time(n, 4, 400))) for n in PROMPTS for _ in range(4)]
    modes: tuple[points.Mode, ...] = ("read", "write")
    handovers = [
        HandoverPoint(
            mode, n, 1000 * n, 0.004 if mode == "read" else 0.0,
            of(0.003 + (1000 * n / 1e8 if mode == "read" else 0.0)), 1000 * n / 1e8, 8, "shm",
        )
        for n in PROMPTS for mode in modes
    ]  # fmt: skip
    edges = [EdgePoint(0.002, 0.001)] * 5
    return Measured(
        "m", tuple(prefill), tuple(decode), tuple(mixed), tuple(handovers), tuple(edges), 10_000, 10_000, 4096, None
    )


@pytest.mark.parametrize("stalls", [0.0, 0.12], ids=["quiet", "stalls"])
def test_constants_come_back(stalls: float) -> None:
    """Within 6 % of the times, whether or not every eighth measurement is a stall of two to five times its length."""
    fitted = fits.fit(measured(stalls=stalls))
    for step in ((1, 0, 0), (1024, 0, 0), (0, 1, 100), (0, 32, 512), (0, 8, 32_000), (1024, 4, 400)):
        assert fitted.cost.step_time(*step) == pytest.approx(COST.step_time(*step), rel=0.06), step
    assert fitted.handover is not None
    assert fitted.handover.tail["read"] == pytest.approx(0.003, rel=0.1)
    assert fitted.handover.bandwidth == pytest.approx(1e8, rel=0.1)
    assert (fitted.handover.serialization, fitted.handover.bytes_per_token) == (0.004, 1000.0)
    assert (fitted.dispatch, fitted.egress) == (0.002, 0.001)
    left_out = sum(line.left_out for line in fitted.lines.values())
    assert left_out > 3 if stalls else left_out <= 2
    assert fits.misfits(fitted) == []


def test_longer_prompts_take_several_steps() -> None:
    """Where a prompt takes more than one step, each step has the base."""
    points = [PrefillPoint(n, -(-n // 512) * 0.05 + n * 0.2e-3, -(-n // 512)) for n in (100, 400, 900, 2000, 5000)]
    fitted = fits.fit(dataclasses.replace(measured(), prefill=tuple(points)))
    assert fitted.cost.prefill_base == pytest.approx(0.05)
    assert fitted.cost.prefill_per_token == pytest.approx(0.2e-3)


def test_no_cost_is_below_zero() -> None:
    """Times that fall with the tokens give no negative cost; they are a misfit."""
    points = [PrefillPoint(n, 1.0 / n) for n in PROMPTS]
    fitted = fits.fit(dataclasses.replace(measured(), prefill=tuple(points)))
    assert min(fitted.lines["prefill"].costs) >= 0
    assert "prefill: one point in ten" in fits.misfits(fitted)[0]


def test_what_is_no_line_is_a_misfit() -> None:
    """Prefill time that grows with the square of the tokens is named, with how far it is off."""
    points = [PrefillPoint(n, 1e-6 * n * n) for n in (32, 64, 128, 256, 512, 1024, 4096)]
    found = fits.misfits(fits.fit(dataclasses.replace(measured(), prefill=tuple(points))))
    assert len(found) == 1
    assert found[0].startswith("prefill: ")


def test_too_many_stalls_are_a_misfit() -> None:
    """A line that ignores a third of its points is not believed, however near the others are."""
    line = lines.Line((1.0,), (0.0,) * 20, (True,) * 13 + (False,) * 7)
    fitted = dataclasses.replace(fits.fit(measured()), lines={"decode": line})
    assert fits.misfits(fitted) == ["decode: 7 of 20 points are far off (at most 25%)"]


def test_nothing_measured_of_mixed_steps_is_said() -> None:
    """They are then taken to cost a decode step and the prompt's tokens, and the fit tells that it was taken so."""
    fitted = fits.fit(dataclasses.replace(measured(), mixed=()))
    assert fitted.mixed_assumed
    assert fitted.cost.mixed_base == 0
    assert fitted.cost.mixed_per_token == fitted.cost.prefill_per_token


@pytest.mark.parametrize(
    ("rows", "why"),
    [([(1, 5)], "too few"), ([(1, 5), (1, 5), (1, 5)], "vary in too few ways")],
    ids=["few", "equal"],
)
def test_points_that_tell_nothing_are_refused(rows: list[tuple[int, int]], why: str) -> None:
    """One prompt length cannot tell a step's base from a token's cost."""
    with pytest.raises(ConfigError, match=why):
        lines.fit(rows, [1.0] * len(rows), "prefill")


def test_two_transports_are_refused() -> None:
    """A fallback in the middle of a measurement is not averaged with what it fell back from."""
    points = measured().handovers
    other = dataclasses.replace(points[0], transport="memmove")
    with pytest.raises(ConfigError, match="memmove and shm"):
        fits.fit(dataclasses.replace(measured(), handovers=(*points, other)))


def test_only_steps_of_the_whole_batch_count() -> None:
    """Before the last stream's first token, and after the first one's end, the batch was smaller: no step of then is
    among those that the median is taken of."""
    slow = tuple(0.5 * i for i in range(4)) + tuple(1.5 + 0.1 * i for i in range(1, 12))
    late = tuple(1.5 + 0.1 * i for i in range(12))
    (point,) = steps.decode_points([Answer("a", 100, slow), Answer("a", 200, late)])
    assert point.seqs == 2
    assert point.seconds == pytest.approx(0.1)
    assert point.context_tokens == pytest.approx(100 + 3 + 6 + 200 + 6)


def test_engines_are_told_apart() -> None:
    """Streams on another engine are another batch."""
    times = tuple(0.1 * i for i in range(12))
    found = steps.decode_points([Answer("a", 10, times), Answer("b", 10, times), Answer("b", 10, times)])
    assert [point.seqs for point in found] == [1, 2]


def test_streams_that_never_met_give_nothing() -> None:
    """One that ended before the other began says nothing of a batch."""
    early, late = tuple(0.1 * i for i in range(9)), tuple(5 + 0.1 * i for i in range(9))
    assert steps.decode_points([Answer("a", 10, early), Answer("a", 10, late)]) == []


def test_each_mode_has_its_own_tail() -> None:
    """Where WRITE's news of the last byte took 100 ms and READ's 3 ms, the profile has both, and a lone request in
    WRITE takes 100 ms more than its steps."""
    found = [
        dataclasses.replace(one, wait=0.1 + one.kv_bytes / 8 / 1e8) if one.mode == "write" else one
        for one in measured(noise=0.0).handovers
    ]
    data = dataclasses.replace(measured(noise=0.0), handovers=tuple(found))
    made = making.profile(data, fits.fit(data), making.Facts("mine", "", "", "", 1, None), [])
    assert made.handover.tail == pytest.approx(0.003)
    assert made.handover.tail_write == pytest.approx(0.1)
    job = Job(512, 10)
    write = simulate(made.fleet(Mode.WRITE, prefills=1, decodes=1), [job]).served[0]
    assert write.handed_over == pytest.approx(0.1 + 512 * 1000 / 8 / 1e8, rel=0.01)


def test_fit_that_is_not_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's own error does not come through."""

    def fails(*_: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(lines, "nnls", fails)
    with pytest.raises(ConfigError, match=r"prefill: no fit was found: Maximum number"):
        lines.fit([(1, 5), (1, 6)], [1.0, 1.1], "prefill")


@pytest.mark.parametrize(
    ("sizes", "enough"),
    [((64, 128, 512), False), ((512,) * 8, False), ((500, 520, 540, 560), False), ((64, 64, 128, 512), True)],
    ids=["three", "one size", "much alike", "enough"],
)
def test_bandwidth_needs_points(sizes: tuple[int, ...], enough: bool) -> None:
    """Fewer than four READ hand-overs, or such of nearly one size, give no bandwidth: the table and [fit] say that
    there were too few points, not that it was not seen to bind."""
    data = measured(noise=0.0)
    one = next(point for point in data.handovers if point.mode == "read")
    found = tuple(dataclasses.replace(one, tokens=n, kv_bytes=1000 * n, wait=0.003 + 1000 * n / 1e8) for n in sizes)
    fitted = fits.fit(dataclasses.replace(data, handovers=found))
    made = making.profile(data, fitted, making.Facts("mine", "", "", "", 1, None), [])
    assert fitted.handover is not None
    assert (fitted.handover.bandwidth is not None) is enough
    assert ("read" in fitted.lines) is enough
    assert ("too few points for a bandwidth" in table(fitted)) is (not enough)
    assert ("bandwidth" in made.fit) is (not enough)
    assert made.handover.bandwidth == (pytest.approx(1e8) if enough else math.inf)
