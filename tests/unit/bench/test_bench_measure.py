"""A whole measurement, in virtual time against a scripted endpoint."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from pdserve.bench.endpoint import Asking
from pdserve.bench.goodput import Search
from pdserve.bench.measure import Measurement, Setup
from pdserve.bench.plan import Wanted, make
from pdserve.bench.results import Machine, Results
from pdserve.bench.runner import Brake
from pdserve.bench.slo import Slo
from pdserve.bench.transport import Expected, KvdFacts
from pdserve.bench.workload.lengths import Span
from pdserve.rpc.errors import ConfigError, ContextExceeded, EngineDied, RequestCancelled
from tests.unit.bench.virtual import Answer, Quiet, Scripted, run

SHM: dict[str, Any] = {"mode": "write", "transport": "shm"}
SLO = Slo(ttft=1.0)


def wanted(**more: Any) -> Wanted:
    """Twenty requests of ten tokens in and three out."""
    usual: dict[str, Any] = {"prompt": Span(10, 10), "output": Span(3, 3), "requests": 20, "slo": SLO}
    return Wanted(**(usual | more))


def measure(
    endpoint: Scripted,
    ask: Wanted,
    *,
    asking: Asking | None = None,
    expected: Expected | None = None,
    kvd: KvdFacts | None = None,
    warmups: int = 0,
    watch: Callable[[Brake, Quiet], None] = lambda _brake, _view: None,
    give_up: int = 10,
    kept: list[Results] | None = None,
) -> tuple[Results, Quiet]:
    """The results, and what the user was told."""

    async def measured() -> tuple[Results, Quiet]:
        async def asked() -> KvdFacts:
            assert kvd is not None
            return kvd

        setup = Setup(
            "somewhere", "grpc", asking or Asking(), expected or Expected(), Machine("cpu", 2, 8.0, "Linux"),
            "a label", warmups, asked if kvd else None,
        )  # fmt: skip
        brake, view = Brake(give_up), Quiet()
        watch(brake, view)
        plan = make(ask)
        now = lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)  # noqa: E731
        keep = kept.append if kept is not None else lambda _: None
        return await Measurement(plan, endpoint, setup, brake, view, keep=keep, now=now).run(), view

    return run(measured())


def by_run(*ttfts: float, requests: int = 20) -> Scripted:
    """Number 0 is the probe; then `requests` answers a run, with that run's TTFT."""
    return Scripted(lambda k: Answer(ttfts[max(k - 1, 0) // requests], (0.01, 0.01), says=SHM))


def test_a_sweep_has_a_run_a_rate_and_the_goodput_among_them() -> None:
    """1 and 2 requests a second hold, 4 does not: attainment, good rate and goodput by their definitions."""
    kept: list[Results] = []
    results, _ = measure(by_run(0.5, 1.0, 1.5), wanted(rates=(1.0, 2.0, 4.0)), kept=kept)
    assert [(run.rate, run.summary.attainment, run.summary.good_rate) for run in results.runs] == [
        (1.0, 1.0, 1.0), (2.0, 1.0, 2.0), (4.0, 0.0, 0.0),
    ]  # fmt: skip
    assert results.goodput is not None
    assert (results.goodput.value, results.goodput.high) == (2.0, 4.0)
    assert not results.partial
    assert results.created == results.runs[0].started == "2026-01-02T03:04:05Z"
    assert results.target.mode == "write"
    assert results.target.transport == "shm"
    assert [(len(one.runs), one.partial) for one in kept] == [(1, True), (2, True), (3, True), (3, False)]


def test_a_run_lasts_as_long_as_was_offered() -> None:
    """Twenty requests at 2 a second: the last is sent after 10 s and ends 0.52 s later; nothing is late."""
    results, _ = measure(by_run(0.5), wanted(rates=(2.0,)))
    summary = results.runs[0].summary
    assert results.runs[0].duration == pytest.approx(10.52)
    assert summary.request_throughput == pytest.approx(20 / 10.52)
    assert summary.output_token_throughput == pytest.approx(60 / 10.52)
    assert summary.late is not None
    assert summary.late.p99 == 0.0
    assert summary.ttft is not None
    assert summary.ttft.p50 == 0.5


def test_a_closed_loop_is_good_by_the_second() -> None:
    """Four in flight, half a second each: 20 good ones in 2.6 s."""
    results, _ = measure(by_run(0.5), wanted(concurrency=(4,)))
    assert results.runs[0].rate is None
    assert results.runs[0].summary.good_rate == pytest.approx(20 / 2.6)
    assert results.runs[0].summary.late is None
    assert results.goodput is None
    assert results.workload.arrivals == {"kind": "closed"}


def test_a_search_measures_until_the_interval_is_narrow() -> None:
    """The third rate tried is the middle; what holds and what does not moves the ends."""
    search = Search(1.0, 9.0, tolerance=0.5)
    results, _ = measure(by_run(0.5, 2.0, 2.0, 0.5), wanted(search=search))
    assert [run.rate for run in results.runs] == [1.0, 9.0, 5.0, 3.0]
    assert results.goodput is not None
    assert results.goodput.value == 3.0


def test_an_endpoint_that_fails_mid_run_leaves_partial_results() -> None:
    """The first run and ten of the second's are kept, marked, and the reason is said; no third is begun."""
    endpoint = Scripted(lambda k: Answer(says=SHM) if k < 31 else Answer(error=EngineDied("gone")))
    kept: list[Results] = []
    results, _ = measure(endpoint, wanted(rates=(1.0, 2.0, 4.0)), kept=kept)
    assert results.partial
    assert results.why_partial == "10 requests in a row failed, the last with ENGINE_DIED: gone; not measured: 4 req/s"
    assert [(run.partial, run.summary.completed, run.summary.failed) for run in results.runs] == [
        (False, 20, 0), (True, 10, 10),
    ]  # fmt: skip
    assert results.goodput is None
    assert kept[-1] == results


def test_an_endpoint_that_fails_at_the_very_end_is_noticed() -> None:
    """Three failures are no row of ten, but nobody is there any more: partial, and no second run."""
    endpoint = Scripted(lambda k: Answer(says=SHM) if k < 18 else Answer(error=EngineDied("gone")))

    def watch(_: Brake, view: Quiet) -> None:
        view.on_ended = lambda record: setattr(endpoint, "gone", record.error is not None)

    results, _ = measure(endpoint, wanted(rates=(1.0, 2.0)), watch=watch)
    assert [(run.partial, run.summary.failed) for run in results.runs] == [(True, 3)]
    assert results.why_partial == "the endpoint failed: nobody listens; not measured: 2 req/s"


def test_failures_of_an_endpoint_that_is_there_are_results() -> None:
    """Three failures, and it still answers: the run is whole."""
    endpoint = Scripted(lambda k: Answer(says=SHM, error=EngineDied("gone") if k in (5, 6, 9) else None))
    results, _ = measure(endpoint, wanted(rates=(1.0,)))
    assert not results.partial
    assert results.runs[0].summary.failed == 3
    assert results.runs[0].summary.missed == {"error": 3}
    assert results.runs[0].summary.attainment == 17 / 20


def test_an_interrupt_keeps_what_was_measured() -> None:
    """Ctrl-C after the fifth answer: five records and one that was under way."""

    def watch(brake: Brake, view: Quiet) -> None:
        view.on_ended = lambda record: brake.pull("ended by SIGINT") if record.index == 4 else None

    results, _ = measure(Scripted(lambda k: Answer(1.5, says=SHM)), wanted(rates=(1.0,)), watch=watch)
    assert results.partial
    assert results.why_partial == "ended by SIGINT"
    assert results.runs[0].summary.completed == 5


def test_an_interrupt_before_the_first_run_ends_it() -> None:
    """While the probe waits: nothing was measured, and that is said."""
    with pytest.raises(RequestCancelled, match="nothing was measured: ended by SIGINT"):
        measure(
            Scripted(lambda _: Answer(hang=True)),
            wanted(rates=(1.0,)),
            watch=lambda brake, _: brake.pull("ended by SIGINT"),
        )


def test_more_than_the_served_model_takes_is_refused_before_anything_is_sent() -> None:
    """Ten in and three out do not fit twelve."""
    endpoint = Scripted(lambda _: Answer(), longest=12)
    with pytest.raises(ContextExceeded, match="the model takes 12 together"):
        measure(endpoint, wanted(rates=(1.0,)))
    assert endpoint.prompts == []


def test_warm_ups_are_sent_and_forgotten() -> None:
    """Two before the run, with content that no run has."""
    endpoint = Scripted(lambda _: Answer(says=SHM))
    results, _ = measure(endpoint, wanted(rates=(1.0,)), warmups=2)
    assert len(endpoint.prompts) == 1 + 2 + 20
    assert len(results.runs[0].requests) == 20
    assert len({tuple(prompt) for prompt in endpoint.prompts}) == 23


def test_what_a_reader_would_not_think_of_is_said() -> None:
    """Answers too short, and a transport that changed on the way."""
    endpoint = Scripted(lambda k: Answer(0.1, (0.1,), says=SHM | ({"transport": "memmove"} if k == 5 else {})))
    results, view = measure(endpoint, wanted(rates=(1.0,)), expected=Expected(allowed=("memmove",)))
    assert "20 answers are not as long as was asked for" in view.said
    assert any("memmove and shm" in line for line in view.said)
    assert set(results.runs[0].doubts) <= set(view.said)
    assert "memmove and shm: not one transport" in " ".join(results.runs[0].doubts)


@pytest.mark.parametrize(
    ("says", "asking", "expected", "kvd", "words"),
    [
        ({"mode": "write", "transport": "memmove"}, Asking(), Expected(), None, "moved over memmove, which is a fallb"),
        (SHM, Asking(), Expected("rdma"), None, "--expect-transport rdma, but the KV cache moved over shm"),
        ({}, Asking(), Expected("shm"), None, "was not handed over, or the endpoint does not say"),
        (SHM, Asking(mode="read"), Expected(), None, "asked for mode read and was answered in mode write"),
        ({}, Asking(mode="read"), Expected(), None, "answered without a hand-over"),
        (SHM | {"fallbacks": 1}, Asking(), Expected(), None, "left the path that it began on 1 times"),
        (SHM, Asking(), Expected(), KvdFacts(("shm",), "python"), "say --allow-transport python"),
    ],
)
def test_a_silent_fallback_is_refused(
    says: dict[str, Any], asking: Asking, expected: Expected, kvd: KvdFacts | None, words: str
) -> None:
    """The probe's answer is looked at before anything is measured."""
    endpoint = Scripted(lambda _: Answer(says=says))
    with pytest.raises(ConfigError, match=words):
        measure(endpoint, wanted(rates=(1.0,)), asking=asking, expected=expected, kvd=kvd)
    assert len(endpoint.prompts) == 1


@pytest.mark.parametrize(
    ("says", "expected", "kvd"),
    [
        ({"mode": "read", "transport": "memmove"}, Expected(allowed=("memmove",)), None),
        (SHM, Expected("shm"), KvdFacts(("shm",), "compiled")),
        (SHM, Expected(allowed=("python",)), KvdFacts(("shm",), "python")),
        ({}, Expected(), None),
    ],
)
def test_what_is_expected_or_allowed_is_measured(
    says: dict[str, Any], expected: Expected, kvd: KvdFacts | None
) -> None:
    """The named transport, a fallback that was allowed, and a target without a hand-over."""
    results, _ = measure(Scripted(lambda _: Answer(says=says)), wanted(rates=(1.0,)), expected=expected, kvd=kvd)
    assert results.target.transport == says.get("transport", "")
