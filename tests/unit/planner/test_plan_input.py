"""What the plan is given: traces, lengths, metrics; and how it refuses what cannot be planned for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.files import read_trace
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import metrics
from pdserve.planner.planning.candidates import Budget, candidates
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload, of_trace
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Job
from pdserve.rpc.errors import ConfigError

QUICK = Settings(requests=20, goodput=False, binding=False, switches=False)
SLO = Slo(ttft=1.0, itl=0.1)


def ask(prompt: int = 1000, output: int = 100, **more: Any) -> Workload:
    """Requests of one size, one a second where nothing else is said."""
    return Workload(Span(prompt, prompt), Span(output, output), **({"rate": 1.0} | more))


# -- what cannot be planned for -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rate": 0.0}, "a rate of 0 requests a second"),
        ({"rate": None}, "either a rate or a number of requests in flight"),
        ({"concurrency": 4}, "either a rate or a number of requests in flight"),
        ({"rate": None, "concurrency": 0}, "0 requests in flight"),
        ({"hit_rate": 1.2}, "a hit rate of 1.2"),
        ({"burstiness": 0.0}, "a burstiness of 0"),
    ],
)
def test_workload_that_cannot_be(fields: dict[str, Any], why: str) -> None:
    """It is refused with what is wrong about it."""
    with pytest.raises(ConfigError, match=why):
        ask(**fields)


@pytest.mark.parametrize(
    ("slo", "why"),
    [
        (Slo(ttft=0.01), "a TTFT SLO of 10 ms is below the 1.. ms of a request that is alone"),
        (Slo(itl=0.001), "a P99 ITL SLO of 1 ms is below the 2. ms of a request that is alone"),
    ],
)
def test_slo_below_the_floor(slo: Slo, why: str) -> None:
    """An SLO that a lone request misses in every mode is refused, and the floor is said."""
    with pytest.raises(ConfigError, match=why):
        decide(Question(load("mi300x"), ask(), slo), Budget(engines=2), QUICK)


def test_more_tokens_than_memory_or_context() -> None:
    """A request that no engine can hold, and one that the model cannot, are refused with both numbers."""
    profile = load("mi300x")
    with pytest.raises(ConfigError, match="a request of 9000100 tokens does not fit into the KV memory"):
        decide(Question(profile, ask(9_000_000), SLO), Budget(engines=2), QUICK)
    short = replace(profile, max_model_len=4096)
    with pytest.raises(
        ConfigError, match="a request of 5100 tokens, prompt and answer, is more than the context of 4096"
    ):
        decide(Question(short, ask(5000), SLO), Budget(engines=2), QUICK)


def test_misfit_profile() -> None:
    """A profile that says of itself that it does not fit is used only where that is asked for."""
    marked = replace(load("mi300x"), fit={"misfit": "prefill: one point in ten is 40% or more beside the fit"})
    question = Question(marked, ask(), SLO)
    with pytest.raises(ConfigError, match="profile mi300x does not fit what was measured: prefill"):
        decide(question, Budget(engines=2), QUICK)
    assert decide(question, Budget(engines=2), replace(QUICK, allow_misfit=True)).best.attainment > 0.9


def test_no_slo_in_an_open_loop() -> None:
    """Every way gives as many requests a second: there is nothing to choose by. A closed loop can be compared."""
    with pytest.raises(ConfigError, match="without an SLO every way is as good"):
        decide(Question(load("mi300x"), ask(), Slo()), Budget(engines=2), QUICK)
    closed = Question(load("mi300x"), ask(rate=None, concurrency=8), Slo())
    assert decide(closed, Budget(engines=2), QUICK).best.attainment == 1.0


@pytest.mark.parametrize(
    ("engines", "gpus", "why"),
    [
        (0, None, "at least one"),
        (None, None, "how many engines"),
        (2, 8, "how many"),
        (None, 3, "3 accelerators are too few for profile mi300x: an engine takes 4"),
    ],
)
def test_budget_that_cannot_be(engines: int | None, gpus: int | None, why: str) -> None:
    """Neither, both, none, or fewer accelerators than one engine takes."""
    with pytest.raises(ConfigError, match=why):
        candidates(load("mi300x"), Budget(engines, gpus))


def test_ways_by_accelerators() -> None:
    """Eight accelerators are two engines of four: one split in two modes, or two colocated."""
    assert [way.label for way in candidates(load("mi300x"), Budget(gpus=8))] == [
        "2 colocated", "1P:1D READ", "1P:1D WRITE",
    ]  # fmt: skip


# -- traces ---------------------------------------------------------------------------------


def write(path: Path, *lines: str) -> Path:
    """A trace file of these lines."""
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((), "is empty"),
        (("nonsense",), "line 1: not JSON"),
        (('{"time": 0, "prompt_tokens": 5}',), "line 1: no output_tokens"),
        (('{"time": 1, "prompt_tokens": 5, "output_tokens": 1}', '{"time": 0, "prompt_tokens": 5, "output_tokens": 1}'),
         "line 2: time is 0, before the line above"),
        (('{"time": 1, "prompt_tokens": 5, "output_tokens": 1}',), "a trace of one request has no rate"),
        (('{"time": 1, "prompt_tokens": 5, "output_tokens": 1}',) * 2, "it has no rate"),
    ],
)  # fmt: skip
def test_trace_that_is_none(tmp_path: Path, lines: tuple[str, ...], why: str) -> None:
    """It is refused with the line that is at fault."""
    with pytest.raises(ConfigError, match=why):
        of_trace(*read_trace(write(tmp_path / "trace.jsonl", *lines)))


def test_trace_is_replayed(tmp_path: Path) -> None:
    """Lengths, times and shared beginnings are the trace's; another rate stretches it; a longer run goes round."""
    path = write(
        tmp_path / "trace.jsonl",
        '{"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}',
        '{"timestamp": 1000, "input_length": 1030, "output_length": 20, "hash_ids": [1, 3, 4]}',
        '{"timestamp": 4000, "input_length": 512, "output_length": 30, "hash_ids": [9]}',
    )
    workload = of_trace(*read_trace(path))
    assert workload.rate == 0.5
    run = workload.run(3, seed=0)
    assert run.jobs == (Job(1024, 10), Job(1030, 20, 512), Job(512, 30))
    assert run.arrivals == (0.0, 1.0, 4.0)
    assert workload.at(1.0).run(3, seed=0).arrivals == (0.0, 0.5, 2.0)
    longer = workload.run(7, seed=0)
    assert longer.arrivals == (0.0, 1.0, 4.0, 6.0, 7.0, 10.0, 12.0)
    assert longer.jobs[3:6] == run.jobs
    assert workload.with_output(2).run(1, seed=0).jobs == (Job(1024, 20),)


def test_same_seed_same_run() -> None:
    """A workload's run is its seed's; another seed has other arrivals at the same mean rate."""
    workload = replace(ask(), output=Span(10, 50))
    assert workload.run(50, 1) == workload.run(50, 1)
    assert workload.run(50, 1) != workload.run(50, 2)
    arrivals = workload.run(50, 2).arrivals
    assert arrivals is not None
    assert arrivals[-1] == pytest.approx(50)


# -- metrics --------------------------------------------------------------------------------

PAGE = """\
# TYPE pdserve_requests_total counter
pdserve_requests_total{{outcome="finished",reason="",mode="read",model="m"}} {ended}
pdserve_requests_total{{outcome="failed",reason="X",mode="read",model="m"}} 1
# TYPE pdserve_tokens_total counter
pdserve_tokens_total{{kind="input"}} {input}
pdserve_tokens_total{{kind="output"}} {output}
pdserve_tokens_total{{kind="cached"}} {cached}
# TYPE pdserve_proxy_queued gauge
pdserve_proxy_queued {queued}
# TYPE pdserve_proxy_in_flight gauge
pdserve_proxy_in_flight 3
# TYPE pdserve_proxy_engines gauge
pdserve_proxy_engines{{role="prefill",state="ready"}} 1
pdserve_proxy_engines{{role="decode",state="ready"}} 2
pdserve_proxy_engines{{role="decode",state="suspect"}} 1
"""


def page(ended: int, input: int, output: int, cached: int, queued: int, at: float) -> metrics.Reading:
    """A reading of such a page."""
    text = PAGE.format(ended=ended, input=input, output=output, cached=cached, queued=queued)
    return metrics.read(text, at)


def test_metrics_tell_the_workload() -> None:
    """Between two readings: arrivals are what ended and what is open more than before; lengths are means."""
    first, second = page(10, 5000, 1000, 0, 0, at=100.0), page(50, 45_000, 5000, 10_000, 20, at=160.0)
    found = metrics.workload(first, second)
    assert found.rate == pytest.approx((40 + 20) / 60)
    assert (found.prompt, found.output) == (Span(1000, 1000), Span(100, 100))
    assert found.hit_rate == pytest.approx(0.25)
    assert metrics.deployed(second.engines) == "1 prefill, 2 decode engines are ready"


def test_metrics_that_tell_nothing() -> None:
    """A quiet window, a proxy that was started anew, another server's metrics and no metrics are told apart."""
    first = page(10, 5000, 1000, 0, 0, at=0.0)
    with pytest.raises(ConfigError, match="no request was answered"):
        metrics.workload(first, replace(first, at=60.0))
    with pytest.raises(ConfigError, match="was started anew"):
        metrics.workload(first, page(2, 1000, 100, 0, 0, at=60.0))
    with pytest.raises(ConfigError, match="not the metrics of a pdserve proxy"):
        metrics.read("# TYPE up gauge\nup 1\n", 0.0)
    with pytest.raises(ConfigError, match="no metrics in Prometheus' text format"):
        metrics.read("<html>{not metrics", 0.0)
