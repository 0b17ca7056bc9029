"""Small cases whose times are worked out by hand: each rule of the model by itself."""

import math
from dataclasses import replace

import pytest

from pdserve.bench.slo import Slo
from pdserve.costmodel import CostModel
from pdserve.planner.simulator import (
    EngineDies,
    EngineReturns,
    EngineSpec,
    Fleet,
    Handover,
    Job,
    Mode,
    Role,
    RoleChanges,
    Routing,
    simulate,
    split,
)
from pdserve.rpc.errors import ConfigError

COST = CostModel(
    prefill_base=0.1,
    prefill_per_token=0.001,
    decode_base=0.01,
    decode_per_seq=0.001,
    decode_per_context_token=0.0,
    mixed_base=0.05,
    mixed_per_token=0.002,
)
ENGINE = EngineSpec(COST, token_budget=1000, max_seqs=100, kv_tokens=100_000)


def colocated(spec: EngineSpec = ENGINE, engines: int = 1, **more: object) -> Fleet:
    """Engines for both phases."""
    return Fleet((Role.BOTH,) * engines, Mode.COLOCATED, both=spec, **more)  # type: ignore[arg-type]


def pair(mode: Mode, spec: EngineSpec = ENGINE, **handover: object) -> Fleet:
    """One prefill and one decode engine."""
    return Fleet(split(1, 1), mode, spec, spec, spec, Handover(**handover))  # type: ignore[arg-type]


def test_one_request_alone() -> None:
    """A prompt's step, then one decode step a token after the first; dispatch and egress around them."""
    outcome = simulate(colocated(dispatch=0.02, egress=0.003), [Job(100, 5)], [1.0])
    (one,) = outcome
    assert one.ttft == pytest.approx(0.02 + 0.2 + 0.003)
    assert outcome.itls(0) == pytest.approx([0.011] * 4)
    assert one.e2e == pytest.approx(0.02 + 0.2 + 4 * 0.011 + 0.003)


def test_prompts_share_the_budget_first_come_first_served() -> None:
    """Three prompts of 600 and a budget of 1000: 600 + 400 of the second, then its 200 and all of the third."""
    outcome = simulate(pair(Mode.READ), [Job(600, 1)] * 3)
    first, second = 0.1 + 1.0, 0.1 + 0.8
    assert [one.prefilled for one in outcome] == pytest.approx([first, first + second, first + second])


def test_a_prompt_stalls_those_that_decode() -> None:
    """A step with both costs the decode line and the mixed one, and each running answer waits for it."""
    outcome = simulate(colocated(), [Job(100, 10), Job(200, 2)], [0.0, 0.25])
    # 0.2, then decode steps of 11 ms; the second prompt waits for the step under way at 0.25.
    begins = 0.2 + 5 * 0.011
    stall = 0.011 + 0.05 + 0.4
    assert outcome.served[1].ttft == pytest.approx(begins + stall - 0.25)
    assert outcome.served[0].itl_max == pytest.approx(stall)


def test_a_split_does_not_stall() -> None:
    """The same two requests on two engines: no gap is longer than a decode step."""
    outcome = simulate(pair(Mode.READ), [Job(100, 10), Job(200, 2)], [0.0, 0.25])
    assert outcome.served[0].itl_max == pytest.approx(0.011)


def test_read_waits_for_prefill_then_pulls() -> None:
    """TTFT = prefill + serialization + bytes over the link + tail + one decode step."""
    fleet = pair(Mode.READ, serialization=0.01, tail=0.02, bytes_per_token=10, bandwidth=10_000)
    (one,) = simulate(fleet, [Job(100, 3)])
    assert one.ttft == pytest.approx(0.2 + 0.01 + 0.1 + 0.02 + 0.011)
    assert one.handed_over == pytest.approx(0.13)


def test_write_pushes_while_it_computes() -> None:
    """Only the last layer is left at the end of the step where the link keeps up."""
    fleet = pair(Mode.WRITE, serialization=9.0, tail=0.02, bytes_per_token=10, bandwidth=10_000, layers=4)
    (one,) = simulate(fleet, [Job(100, 3)])
    assert one.ttft == pytest.approx(0.2 + 0.1 / 4 + 0.02 + 0.011)


def test_write_on_a_slow_link_waits_for_what_is_left() -> None:
    """A link that needs twice the step's time has half of it left when the step ends."""
    fleet = pair(Mode.WRITE, bytes_per_token=10, bandwidth=2_500, layers=4)
    (one,) = simulate(fleet, [Job(100, 3)])
    assert one.handed_over == pytest.approx(0.4 - 0.2)


def test_transfers_share_a_link() -> None:
    """Two prompts of one step are pulled at half the speed each."""
    fleet = pair(Mode.READ, bytes_per_token=10, bandwidth=10_000)
    outcome = simulate(fleet, [Job(100, 1), Job(100, 1)])
    assert [one.handed_over for one in outcome] == pytest.approx([0.2, 0.2])
    apart = simulate(replace(fleet, roles=split(2, 2)), [Job(100, 1), Job(100, 1)])
    assert [one.handed_over for one in apart] == pytest.approx([0.1, 0.1])


def test_what_decode_has_is_not_moved() -> None:
    """A prefix on the decode engine shortens the transfer and nothing else."""
    fleet = pair(Mode.READ, bytes_per_token=10, bandwidth=10_000)
    (one,) = simulate(fleet, [Job(100, 1, decode_hit=80)])
    assert one.handed_over == pytest.approx(0.02)
    assert one.prefilled == pytest.approx(0.2)


def test_a_prefix_hit_is_not_computed() -> None:
    """Only the rest of the prompt costs time; of a whole hit one token does."""
    outcome = simulate(colocated(), [Job(100, 1, hit=60)])
    assert outcome.served[0].ttft == pytest.approx(0.1 + 0.04)
    assert simulate(colocated(), [Job(100, 1, hit=100)]).served[0].ttft == pytest.approx(0.101)


def test_blocks_are_pinned_at_prefill_until_pulled() -> None:
    """Memory for one prompt: the second is computed when the first has been pulled, not before."""
    spec = replace(ENGINE, kv_tokens=150)
    fleet = pair(Mode.READ, bytes_per_token=10, bandwidth=1_000)
    fleet = replace(fleet, prefill=spec, routing=Routing.ROUND_ROBIN)
    outcome = simulate(fleet, [Job(100, 1)] * 2)
    assert outcome.served[0].handed_over == pytest.approx(1.0)
    assert outcome.served[1].prefilled == pytest.approx(0.2 + 1.0 + 0.2)
    assert outcome.engines[0].kv_high == 100


def test_preemption_recomputes_the_youngest() -> None:
    """Room for 25 tokens, two prompts of 10: at 12 each the younger goes, and comes back with its tokens as prompt."""
    spec = replace(ENGINE, kv_tokens=25)
    outcome = simulate(colocated(spec, routing=Routing.ROUND_ROBIN), [Job(10, 10)] * 2)
    spent = outcome.engines[0]
    assert spent.preemptions == 1
    # 20 tokens of prompts; the younger had 1 + 2 tokens when it went.
    assert spent.prefill_tokens == 20 + 13
    assert outcome.served[0].itl_max == pytest.approx(0.012)
    assert outcome.served[1].itl_max > 0.1
    assert [one.tokens for one in outcome] == [10, 10]


def test_the_first_token_can_be_prefills() -> None:
    """Then TTFT ends with the prompt, and the hand-over is the first gap."""
    fleet = pair(Mode.READ, tail=0.5, first_token=Role.PREFILL)
    outcome = simulate(fleet, [Job(100, 3)])
    assert outcome.served[0].ttft == pytest.approx(0.2)
    assert outcome.itls(0) == pytest.approx([0.511, 0.011])


def test_a_closed_loop_sends_when_one_is_done() -> None:
    """Two in flight: the third is sent when the first is done."""
    outcome = simulate(colocated(), [Job(100, 1)] * 3, concurrency=2)
    assert [one.sent for one in outcome] == pytest.approx([0.0, 0.0, 0.3])


def test_requests_wait_for_credits() -> None:
    """Least load sends no more than an engine has room for; the rest waits at the proxy, and is not preempted."""
    spec = replace(ENGINE, kv_tokens=250)
    outcome = simulate(colocated(spec), [Job(100, 20)] * 4)
    assert outcome.engines[0].preemptions == 0
    assert outcome.engines[0].kv_high <= 240


def test_least_load_and_turns() -> None:
    """A long request keeps one engine busy: least load sends all short ones to the other, turns do not."""
    jobs = [Job(5000, 2)] + [Job(10, 2)] * 4
    arrivals = [0.0, 0.01, 0.02, 0.03, 0.04]
    worst = {}
    for routing in Routing:
        outcome = simulate(colocated(engines=2, routing=routing), jobs, arrivals)
        worst[routing] = max(one.ttft for one in outcome.served[1:])
    assert worst[Routing.LEAST_LOAD] < 0.5 < worst[Routing.ROUND_ROBIN]


def test_a_dead_decode_engine_costs_a_second_attempt() -> None:
    """What the client has is kept; the other engine computes prompt and tokens again and goes on."""
    fleet = replace(pair(Mode.READ), roles=split(1, 2), routing=Routing.ROUND_ROBIN)
    outcome = simulate(fleet, [Job(100, 10)], happenings=[EngineDies(0.2 + 4.5 * 0.011, 1)])
    (one,) = outcome
    assert one.attempts == 2
    assert one.tokens == 10
    # Four tokens were told; prefill computes 104 tokens, decode goes on.
    assert one.itl_max == pytest.approx(0.5 * 0.011 + 0.204 + 0.011)
    assert outcome.engines[0].prefill_tokens == 204


def test_without_any_engine_requests_wait_or_stay_unfinished() -> None:
    """They wait for the engine's return; without one they are reported, and nothing hangs."""
    dies = EngineDies(0.05, 0)
    back = simulate(colocated(), [Job(100, 1)], happenings=[dies, EngineReturns(2.0, 0)])
    assert back.served[0].ttft == pytest.approx(2.2)
    gone = simulate(colocated(), [Job(100, 1)], happenings=[dies])
    assert gone.unfinished == (0,)
    assert gone.attainment(Slo(ttft=10.0)) == 0.0
    assert gone.missed(Slo(ttft=10.0)) == {"unfinished": 1.0}


def test_a_changed_role_takes_new_work_and_ends_the_old() -> None:
    """Of two decode engines one becomes a prefill engine: its answer goes on there, and prompts are computed there."""
    fleet = replace(pair(Mode.READ), roles=split(1, 2), routing=Routing.ROUND_ROBIN)
    jobs = [Job(100, 50)] + [Job(500, 2)] * 4
    changes = [RoleChanges(0.25, 1, Role.PREFILL)]
    changed = simulate(fleet, jobs, [0.0] + [0.3] * 4, happenings=changes)
    assert changed.engines[1].prefill_tokens == 1000
    assert changed.engines[1].decode_tokens == 50
    assert [one.attempts for one in changed] == [1] * 5


def test_tight_pools_do_not_block_each_other() -> None:
    """Room for two requests an engine and no credits: WRITE's reservations and prefill's pins come in one order."""
    small = replace(ENGINE, kv_tokens=220)
    fleet = replace(pair(Mode.WRITE, small), roles=split(2, 2), routing=Routing.ROUND_ROBIN)
    outcome = simulate(fleet, [Job(100, 100)] * 12)
    assert outcome.unfinished == ()
    assert sum(spent.preemptions for spent in outcome.engines) > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"jobs": []}, "no jobs"),
        ({"jobs": [Job(1, 1)], "arrivals": [0.0, 1.0]}, "1 jobs, but 2"),
        ({"jobs": [Job(1, 1)] * 2, "arrivals": [1.0, 0.0]}, "ascend"),
        ({"jobs": [Job(1, 1)], "arrivals": [math.nan]}, "ascend"),
        ({"jobs": [Job(1, 1)], "concurrency": 0}, "concurrency"),
        ({"jobs": [Job(1, 1)], "happenings": [EngineDies(0.0, 7)]}, "no such engine"),
        ({"jobs": [Job(100_000, 1)]}, "does not fit"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: dict[str, object], says: str) -> None:
    """With a message that says what is wrong."""
    with pytest.raises(ConfigError, match=says):
        simulate(colocated(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Job(0, 1), "at least one token"),
        (lambda: Job(10, 1, hit=11), "within the prompt"),
        (lambda: EngineSpec(kv_tokens=0), "kv_tokens"),
        (lambda: EngineSpec(token_budget=10, max_seqs=11), "decodes in every step"),
        (lambda: Handover(tail=-1.0), "tail"),
        (lambda: Handover(bandwidth=0.0), "bandwidth"),
        (lambda: Fleet((Role.PREFILL,), Mode.READ), "prefill and a decode"),
        (lambda: Fleet(split(1, 1), Mode.COLOCATED), "both phases"),
        (lambda: Fleet((Role.BOTH,), Mode.COLOCATED, dispatch=-1.0), "dispatch"),
    ],
)
def test_values_that_cannot_be_are_refused(make: object, says: str) -> None:
    """Where they are made."""
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
