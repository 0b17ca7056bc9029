"""What too much load, a fallback on the way and a fault of the bench itself leave, in virtual time."""

from typing import Any

import pytest

from pdserve.bench.endpoint import Asking, Send
from pdserve.bench.goodput import Search
from pdserve.bench.results import Results
from pdserve.bench.transport import Expected
from pdserve.bench.words import report
from pdserve.rpc.errors import DeadlinePassed, EngineDied, Overloaded, PdserveError
from tests.unit.bench.test_bench_measure import SHM, measure, wanted
from tests.unit.bench.virtual import Answer, Scripted


def one_rate_too_high(failed: Answer) -> Scripted:
    """Number 0 is the probe; of the runs of 20, the second is answered by `failed` alone, the others well."""
    return Scripted(lambda k: failed if 21 <= k < 41 else Answer(0.5, (0.01, 0.01), says=SHM))


TOO_MUCH = {
    "refused": Answer(error=Overloaded("no room")),
    "refused by a server with a code of its own": Answer(error=Overloaded("slow down", reason="HTTP_429")),
    "too late": Answer(hang=True),
    "too late by the server's word": Answer(error=DeadlinePassed("10 s are over")),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_rate_at_which_nothing_completes_is_an_answer_of_a_search(case: str) -> None:
    """It did not hold; the search goes on below it, and what was measured is whole."""
    search = Search(1.0, 9.0, tolerance=0.5)
    results, _ = measure(one_rate_too_high(TOO_MUCH[case]), wanted(search=search), asking=Asking(timeout=10.0))
    assert not results.partial, results.why_partial
    assert [(run.rate, run.summary.completed) for run in results.runs] == [(1.0, 20), (9.0, 0), (5.0, 20)]
    assert results.goodput is not None
    assert results.goodput.value == 5.0
    assert [one.requests for one in results.goodput.tried] == [20, 20, 20]


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_rate_at_which_nothing_completes_is_a_run_of_a_sweep(case: str) -> None:
    """Attainment 0, and the next rate is measured."""
    results, _ = measure(one_rate_too_high(TOO_MUCH[case]), wanted(rates=(1.0, 4.0, 2.0)), asking=Asking(timeout=10.0))
    assert [run.summary.attainment for run in results.runs] == [1.0, 0.0, 1.0]
    assert not results.partial


def test_deadlines_in_a_row_end_a_closed_loop() -> None:
    """Each place would wait for every other request too: after ten there is nobody, as after ten of any failure."""
    results, _ = measure(Scripted(lambda k: Answer(hang=k > 0)), wanted(concurrency=(1,)), asking=Asking(timeout=10.0))
    assert results.why_partial == "10 requests in a row failed, the last with DEADLINE_EXCEEDED: no end within 10 s"


def test_a_run_of_which_all_failed_otherwise_ends_the_search() -> None:
    """Engines that die say nothing of the load."""
    results, _ = measure(
        one_rate_too_high(Answer(error=EngineDied("gone"))), wanted(search=Search(1.0, 9.0)), give_up=0
    )
    assert results.partial
    assert results.why_partial.startswith(
        "the endpoint failed: not one request completed, the first failed with ENGINE"
    )


def test_an_endpoint_that_hangs_and_does_not_say_what_it_is_has_failed() -> None:
    """Deadlines alone are of the load; that nobody answers the question after the run is not."""
    endpoint = Scripted(lambda k: Answer(hang=k > 0))
    results, _ = measure(
        endpoint,
        wanted(rates=(1.0,)),
        asking=Asking(timeout=10.0),
        watch=lambda _, view: setattr(view, "on_ended", lambda record: setattr(endpoint, "gone", record.index == 19)),
    )
    assert results.why_partial == "the endpoint failed: nobody listens"


def moved(*transports: str) -> Scripted:
    """The probe's transport, then that of each run of 20."""
    return Scripted(
        lambda k: Answer(0.5, (0.01, 0.01), says=SHM | {"transport": transports[(k + 19) // 20 if k else 0]})
    )


@pytest.mark.parametrize(
    ("transports", "expected", "why"),
    [
        (("shm", "memmove", "shm"), Expected(), "at 1 req/s: 20 of 20 KV caches moved over memmove, which is a fallba"),
        (("shm", "shm", "memmove"), Expected(), "at 2 req/s: 20 of 20 KV caches moved over memmove, which is a fallba"),
        (("rdma", "shm", "shm"), Expected("rdma"), "at 1 req/s: 20 of 20 KV caches moved over shm, not over rdma"),
    ],
)
def test_a_fallback_after_the_probe_is_refused(transports: tuple[str, ...], expected: Expected, why: str) -> None:
    """The measurement ends, the run is marked, and there is no goodput."""
    results, view = measure(moved(*transports), wanted(rates=(1.0, 2.0)), expected=expected)
    assert results.partial
    assert results.why_partial.startswith(why)
    assert results.goodput is None
    assert results.runs[-1].doubts[0] in results.why_partial
    assert results.runs[-1].doubts[0] in view.said
    assert results.runs[-1].doubts[0] in report(results)
    assert not any(run.doubts for run in results.runs[:-1])


def test_an_allowed_fallback_after_the_probe_is_said() -> None:
    """Measured to the end, and every run of it is marked."""
    results, _ = measure(
        moved("shm", "memmove", "shm"), wanted(rates=(1.0, 2.0)), expected=Expected(allowed=("memmove",))
    )
    assert not results.partial
    assert [run.doubts for run in results.runs] == [("the KV cache was moved by memmove, in the probe by shm",), ()]
    assert "DOUBTFUL, 1 req/s: the KV cache was moved by memmove, in the probe by shm" in report(results)


def test_an_exception_leaves_what_was_measured_as_partial() -> None:
    """A fault of the bench in the second run: the first is kept, and no reader takes the file for a whole one."""

    class Faulty(Scripted):
        def prepare(self, prompt: Any, output_tokens: int) -> Send:
            if len(self.prompts) > 25:
                raise ZeroDivisionError("a fault")
            return super().prepare(prompt, output_tokens)

    kept: list[Results] = []
    with pytest.raises(ZeroDivisionError):
        measure(Faulty(lambda _: Answer(says=SHM)), wanted(rates=(1.0, 2.0)), kept=kept)
    assert [len(one.runs) for one in kept] == [1, 1]
    assert kept[-1].partial
    assert kept[-1].why_partial == "broke off: a fault; not measured: 2 req/s"


def test_a_warm_up_without_an_end_is_a_typed_error() -> None:
    """Which one, and how long it was waited for."""
    with pytest.raises(PdserveError, match="warm-up request 2 had no end within 10 s") as caught:
        measure(
            Scripted(lambda k: Answer(hang=k == 2, says=SHM)),
            wanted(rates=(1.0,)),
            warmups=2,
            asking=Asking(timeout=10.0),
        )
    assert isinstance(caught.value, DeadlinePassed)
