"""Where the objectives and the tuned budget of a comparison come from. Pure."""

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2
from pdserve.bench.compare.budget import LEAST, Trial, best, candidates, trial_of
from pdserve.bench.compare.calibration import _busy, _one
from pdserve.bench.compare.objectives import Sample, calibrated, caution, slo_of, words
from pdserve.client import AsyncClient, Engine
from pdserve.client.testing import FakeProxy
from pdserve.rpc.errors import ConfigError, PdserveError
from tests.unit.bench.bench_compare_examples import run

SAMPLES = (
    Sample(1.0, (0.2, 0.2, 0.2)),
    Sample(9.0, (0.2, 0.2, 3.0)),  # one slow request moves no median
    Sample(1.2, (0.2, 0.2, 0.1)),
)


def test_objectives_are_multiples_of_medians() -> None:
    """TTFT 5 x the median of requests, ITL 1.7 x the median of all gaps, held against each request's P99."""
    found = calibrated(SAMPLES, 8)
    slo = slo_of(found)
    assert (found.ttft, found.itl) == (1.2, 0.2)
    assert slo.ttft == pytest.approx(6.0)
    assert slo.itl == pytest.approx(0.34)
    assert slo.itl_of == "p99"
    assert (slo.tpot, slo.e2e) == (None, None)


def test_the_sentence_has_every_number() -> None:
    """The objectives are printed with what they were made of, and how many of those requests met them."""
    said = words(calibrated(SAMPLES, 8))
    for number in ("6.000", "1.200", "0.3400", "0.2000", "3 requests", "8 answers", "2 of the 3 met both"):
        assert number in said


def test_a_machine_that_stutters_by_itself_is_told_of() -> None:
    """Two of three calibration requests met what was made of them: a goodput at 90 % may be out of reach."""
    found = calibrated(SAMPLES, 8)
    assert caution(found, 0.9).startswith("only 2 of 3 calibration requests met")
    assert caution(found, 0.5) == ""


async def test_a_calibration_answer_without_a_token_is_a_typed_error() -> None:
    """It has no TTFT, and is not a fault of the bench."""
    with FakeProxy() as fake:
        fake.answer_events(
            serving_pb2.GenerateResponse(started=serving_pb2.Started(request_id="1", model="fake")),
            serving_pb2.GenerateResponse(delta=serving_pb2.Delta(finish_reason=common_pb2.FINISH_REASON_STOP)),
            serving_pb2.GenerateResponse(finished=serving_pb2.Finished()),
        )
        async with AsyncClient(fake.target) as client:
            with pytest.raises(PdserveError, match="without a token"):
                await _one(client, [1, 2, 3], 4)


def test_without_a_gap_there_is_no_objective() -> None:
    """Answers of one token make no ITL."""
    with pytest.raises(ConfigError, match="no SLO"):
        calibrated((Sample(1.0, ()),), 8)
    with pytest.raises(ConfigError, match="no SLO"):
        calibrated((), 8)


def test_budgets_are_tried_around_what_the_objective_leaves() -> None:
    """0.7 x 0.2 s are left for prompt tokens at 1.2 s / 256: 29 tokens, so 16, 32 and 64."""
    assert candidates(calibrated(SAMPLES, 8), 256, ()) == (16, 32, 64)
    assert candidates(calibrated(SAMPLES, 8), 2560, ()) == (256, 512, 1024)
    assert candidates(calibrated(SAMPLES, 8), 1, ()) == (LEAST, 2 * LEAST, 4 * LEAST)


def test_budgets_that_were_asked_for_are_taken() -> None:
    """In ascending order, each once."""
    assert candidates(calibrated(SAMPLES, 8), 256, (64, 24, 64)) == (24, 64)


def test_the_best_budget_has_the_highest_attainment_then_itl_then_size() -> None:
    """The stated rule, tie by tie."""
    assert best([Trial(16, 0.5, 1.0), Trial(32, 0.6, 0.6)]).budget == 32
    assert best([Trial(16, 0.5, 1.0), Trial(32, 0.5, 0.6)]).budget == 16
    assert best([Trial(16, 0.5, 0.6), Trial(32, 0.5, 0.6)]).budget == 32
    with pytest.raises(ConfigError, match="no token budget"):
        best([])


def test_a_trial_counts_the_itl_apart() -> None:
    """A request that missed TTFT alone met the ITL; a failed one met nothing."""
    assert trial_of(32, run(1.0, 4, 10, miss="ttft")) == Trial(32, 0.4, 1.0)
    assert trial_of(32, run(1.0, 4, 10, miss="itl")) == Trial(32, 0.4, 0.4)
    assert trial_of(32, run(1.0, 4, 10, miss="error")) == Trial(32, 0.4, 0.4)


def _engine(name: str, running: int, waiting: int = 0) -> Engine:
    return Engine(name, "both", "m", "a", "ready", 1, 1, running, waiting, 0.1, "")


@pytest.mark.parametrize(
    ("loads", "busy"),
    [
        ([(8, 0), (0, 0)], "engine-0"),
        ([(0, 0), (8, 0)], "engine-1"),
        ([(8, 0), (1, 0)], ""),
        ([(8, 0), (0, 1)], ""),
        ([(7, 1), (0, 0)], ""),
        ([(8, 0), (8, 0)], ""),
        ([(0, 0), (0, 0)], ""),
    ],
)
def test_one_engine_is_full_and_the_other_empty_or_nothing_is_measured(loads: list[tuple[int, int]], busy: str) -> None:
    """Anything between would calibrate another situation than the one that is named."""
    engines = [_engine(f"engine-{place}", *load) for place, load in enumerate(loads)]
    assert _busy(engines, 8) == busy
