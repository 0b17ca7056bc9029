"""Open and closed loops, in virtual time against a scripted endpoint."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from pdserve.bench.results import Record
from pdserve.bench.runner import Brake, Ran, Runner
from pdserve.bench.slo import Slo
from pdserve.bench.workload.asks import Ask
from pdserve.rpc.errors import EngineDied, Overloaded
from tests.unit.bench.virtual import Answer, Quiet, Scripted, run

ALL_GOOD = Slo()


def asks(count: int) -> list[Ask]:
    """Of ten tokens each."""
    return [Ask(index, 10, 3) for index in range(count)]


def offer(
    endpoint: Scripted,
    *,
    due: Sequence[float] = (),
    in_flight: int = 0,
    count: int = 0,
    slo: Slo = ALL_GOOD,
    timeout: float = 60.0,
    give_up: int = 10,
    on_ended: Callable[[Brake, Record], None] = lambda _brake, _record: None,
) -> tuple[Ran, Brake]:
    """One run, open where `due` is given."""

    async def ran() -> tuple[Ran, Brake]:
        brake, view = Brake(give_up), Quiet()
        view.on_ended = lambda record: on_ended(brake, record)
        runner = Runner(endpoint, slo, brake, view, timeout=timeout)
        if due:
            return await runner.open_loop(asks(len(due)), due, lambda index: [index]), brake
        return await runner.closed_loop(asks(count), in_flight, lambda index: [index]), brake

    return run(ran())


def test_an_open_loop_sends_when_due_however_slow_the_answers() -> None:
    """Answers take 50 s; the requests still go out at 0.5, 1 and 1.25 s."""
    endpoint = Scripted(lambda _: Answer(50.0))
    due = [0.5, 1.0, 1.25]
    ran, _ = offer(endpoint, due=due)
    assert [record.sent for record in ran.records] == due == [record.due for record in ran.records]
    assert endpoint.most_in_flight == 3
    assert endpoint.prompts == [[0], [1], [2]]
    assert endpoint.output_tokens == [3, 3, 3]


def test_a_closed_loop_keeps_n_in_flight() -> None:
    """Seven answers of one second, three at a time, take three seconds; due is when a place was free."""
    endpoint = Scripted(lambda _: Answer(1.0))
    ran, _ = offer(endpoint, count=7, in_flight=3)
    assert endpoint.most_in_flight == 3
    assert [record.sent for record in ran.records] == [0, 0, 0, 1, 1, 1, 2]
    assert ran.duration == 3.0


def test_a_record_has_the_stamps_and_is_judged_by_them() -> None:
    """TTFT 0.2, gaps 0.03, 0.05 and 0.04: TPOT is 0.04, the longest gap misses its objective."""
    endpoint = Scripted(lambda _: Answer(0.2, (0.03, 0.05, 0.04), says={"prompt_tokens": 11, "cached_tokens": 8}))
    ran, _ = offer(endpoint, due=[1.0], slo=Slo(ttft=0.2, itl=0.045, itl_of="max", e2e=1.0))
    (record,) = ran.records
    assert record.ttft == 0.2
    assert record.itls == (0.03, 0.05, 0.04)
    assert record.tpot == 0.04
    assert record.e2e == 0.32
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (11, 8, 4)
    assert record.missed == ("itl",)
    assert ran.duration == pytest.approx(1.32)


def test_several_tokens_in_one_chunk_have_one_gap_and_count_for_tpot() -> None:
    """Three chunks of seven tokens: two gaps; TPOT is over the six tokens after the first, as vLLM has it."""
    ran, _ = offer(Scripted(lambda _: Answer(0.1, (0.3, 0.3), says={"output_tokens": 7})), due=[0.0])
    assert ran.records[0].itls == (0.3, 0.3)
    assert ran.records[0].tpot == pytest.approx(0.1)


def test_a_failure_is_a_result_with_its_reason() -> None:
    """What came before it is kept, but it met no objective, and the run goes on."""
    script = {0: Answer(0.1, (0.2,), error=EngineDied("gone")), 1: Answer(0.1)}
    ran, brake = offer(Scripted(script.__getitem__), due=[0.0, 1.0])
    failed, good = ran.records
    assert failed.error is not None
    assert (failed.error.reason, failed.error.message) == ("ENGINE_DIED", "gone")
    assert (failed.ttft, failed.itls, failed.output_tokens, failed.e2e) == (0.1, (0.2,), 2, None)
    assert failed.missed == ("error",)
    assert good.missed == ()
    assert not brake.pulled
    assert not ran.broke_off


def test_a_request_without_an_end_ends_at_its_deadline() -> None:
    """As DEADLINE_EXCEEDED, five seconds after it was sent."""
    ran, _ = offer(Scripted(lambda _: Answer(0.1, hang=True)), due=[2.0], timeout=5.0)
    assert ran.records[0].error is not None
    assert ran.records[0].error.reason == "DEADLINE_EXCEEDED"


def test_an_answer_without_a_token_is_a_failure() -> None:
    """Nothing can be measured of it."""

    class Mute(Scripted):
        async def _send(self, answer, trail):  # type: ignore[no-untyped-def]
            outcome = await super()._send(answer, trail)
            trail.chunks.clear()
            return outcome

    ran, _ = offer(Mute(lambda _: Answer()), due=[0.0])
    assert ran.records[0].error is not None
    assert ran.records[0].error.reason == "NO_TOKEN"


@pytest.mark.parametrize("open_", [True, False])
def test_failures_in_a_row_break_the_run_off(open_: bool) -> None:
    """From request 4 on nobody answers: after ten failures nothing more is sent; what was measured is there."""
    endpoint = Scripted(lambda k: Answer(0.1) if k < 4 else Answer(0.1, error=EngineDied("gone")))
    load = {"due": [float(k) for k in range(50)]} if open_ else {"count": 50, "in_flight": 1}
    ran, brake = offer(endpoint, **load)
    assert brake.pulled
    assert brake.why == "10 requests in a row failed, the last with ENGINE_DIED: gone"
    assert ran.broke_off
    assert [record.error is None for record in ran.records] == [True] * 4 + [False] * 10


def test_a_success_or_a_want_of_room_ends_the_row() -> None:
    """Failures that are not in a row, and OVERLOADED in any number, leave the run whole."""
    script = [EngineDied("gone") if k % 10 else None for k in range(30)] + [Overloaded("full")] * 20
    ran, brake = offer(Scripted(lambda k: Answer(error=script[k])), count=50, in_flight=1)
    assert not brake.pulled
    assert len(ran.records) == 50


def test_zero_never_gives_up() -> None:
    """All thirty failures are kept."""
    ran, brake = offer(Scripted(lambda _: Answer(error=EngineDied("x"))), count=30, in_flight=2, give_up=0)
    assert not brake.pulled
    assert len(ran.records) == 30


@pytest.mark.parametrize("open_", [True, False])
def test_a_pulled_brake_ends_what_is_under_way_and_keeps_it(open_: bool) -> None:
    """Pulled when the first request ends: the second, which hangs, is kept as CANCELLED, the rest is not sent."""
    endpoint = Scripted(lambda k: Answer(1.0, hang=k > 0))
    load = {"due": [0.0, 0.5, 9.0]} if open_ else {"count": 9, "in_flight": 2}
    pull: Callable[[Brake, Record], None] = lambda brake, record: brake.pull("enough")  # noqa: E731
    ran, _ = offer(endpoint, on_ended=pull, **load)
    assert ran.broke_off
    assert [record.error and record.error.reason for record in ran.records] == [None, "CANCELLED"]
    assert endpoint.in_flight == 0


def test_nothing_is_left_behind_when_the_run_itself_is_cancelled() -> None:
    """Every request under way is cancelled with it."""
    endpoint = Scripted(lambda _: Answer(hang=True))

    async def cancelled() -> None:
        runner = Runner(endpoint, ALL_GOOD, Brake(), Quiet(), timeout=60.0)
        task = asyncio.create_task(runner.open_loop(asks(3), [0.0, 0.1, 99.0], lambda index: [index]))
        await asyncio.sleep(1.0)
        assert endpoint.in_flight == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run(cancelled())
    assert endpoint.in_flight == 0
