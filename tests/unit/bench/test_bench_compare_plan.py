"""What a comparison starts, in which order, and what it refuses. Pure."""

import argparse
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from pdserve.bench.compare import command
from pdserve.bench.compare.configurations import CONFIGURATIONS, PAIR, chosen, engine_args, rotated, up_words
from pdserve.bench.compare.settings import estimate, per_rate
from pdserve.bench.compare.sweep import plan_of
from pdserve.rpc.errors import ConfigError
from tests.unit.bench.bench_compare_examples import SLO, settings

STATE = Path("/tmp/state")


def test_every_configuration_is_first_once_in_as_many_repeats() -> None:
    """The order rotates: nobody is always first, and every repeat has all."""
    all_five = chosen("abcde")
    orders = [rotated(all_five, repeat) for repeat in range(5)]
    assert sorted(order[0].key for order in orders) == list("abcde")
    assert all(sorted(one.key for one in order) == list("abcde") for order in orders)
    assert rotated(all_five, 5) == rotated(all_five, 0)


def test_configurations_are_told_in_one_order_whatever_was_asked() -> None:
    """Keys choose, they do not order; an unknown one is refused by name."""
    assert [one.key for one in chosen(["d", "b", "b"])] == ["b", "d"]
    with pytest.raises(ConfigError, match="no configuration x"):
        chosen(["b", "x"])
    with pytest.raises(ConfigError, match="no configuration was chosen"):
        chosen([])


@pytest.mark.parametrize(
    ("key", "has", "lacks"),
    [
        ("a", ["--both", "1"], ["--pin", "--mode", "--prefill"]),
        ("b", ["--both", "2", "--pin"], ["--mode", "--prefill"]),
        ("c", ["--prefill", "1", "--decode", "1", "--mode", "read", "--pin"], ["--both"]),
        ("d", ["--prefill", "1", "--decode", "1", "--mode", "write", "--pin"], ["--both"]),
        ("e", ["--both", "2", "--pin", "--max-num-batched-tokens", "32"], ["--mode"]),
    ],
)
def test_each_configuration_is_started_as_the_issue_names_it(key: str, has: list[str], lacks: list[str]) -> None:
    """One engine on all cores is not pinned, two are; only the split ones have a mode, only (e) a budget."""
    (configuration,) = chosen(key)
    words = up_words(configuration, settings(engine="vllm", model="m"), 32, STATE, 60.0)
    text = " ".join(words)
    assert words[0] == "up"
    assert "--restarts 0" in text
    assert "--no-traces" in text
    assert " ".join(has[:2]) in text
    assert not [word for word in has if word not in words]
    assert not [word for word in lacks if word in words]
    assert ("--max-num-batched-tokens" in words) == (key == "e")


def test_a_tuned_pair_needs_its_budget() -> None:
    """Without one it would be the untuned pair under another name."""
    with pytest.raises(ConfigError, match="needs a token budget"):
        engine_args(CONFIGURATIONS["e"], settings(), None)


def test_the_users_engine_arguments_come_last() -> None:
    """argparse and vLLM take the last of two: the user's."""
    args = engine_args(PAIR, settings(engine_args=("--sim-token-budget", "7")), None)
    assert args[-2:] == ("--sim-token-budget", "7")
    assert args.count("--sim-token-budget") == 2


@pytest.mark.parametrize(("key", "profile"), [("a", "mi300x-tp8"), ("b", "mi300x"), ("c", "mi300x"), ("d", "mi300x")])
def test_the_simulated_costs_are_those_of_the_shipped_profile(key: str, profile: str) -> None:
    """The client may not import the planner: its copy of the fitted constants is the same to the last digit."""
    (configuration,) = chosen(key)
    args = engine_args(configuration, settings(), None)
    flags = dict(zip(args[::2], args[1::2], strict=True))
    shipped = tomllib.loads((resources.files("pdserve.planner") / "profiles" / f"{profile}.toml").read_text())
    for role in ("colocated",) if configuration.both else ("prefill", "decode"):
        for name in ("prefill_base", "prefill_per_token", "decode_base", "decode_per_seq", "mixed_base"):
            assert float(flags[f"--sim-cost-{name.replace('_', '-')}"]) == shipped[role][name], (role, name)
        assert float(flags["--sim-cost-mixed-per-token"]) == shipped[role]["mixed_per_token"]
        assert shipped[role]["decode_per_context_token"] == 0
        assert int(flags["--sim-token-budget"]) == shipped[role]["token_budget"]


def test_scale_is_a_factor_on_every_cost() -> None:
    """Costs x 0.1: nothing of a step keeps its length."""
    one, tenth = (engine_args(PAIR, settings(scale=scale), None) for scale in (1.0, 0.1))
    costs = [place for place, word in enumerate(one) if word.startswith("--sim-cost-")]
    assert len(costs) == 6
    for place in costs:
        assert float(tenth[place + 1]) == pytest.approx(0.1 * float(one[place + 1]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rates": (), "requests": ()}, "one for each"),
        ({"rates": (2.0, 1.0)}, "ascend"),
        ({"rates": (1.0, 1.0)}, "ascend"),
        ({"rates": (0.0, 1.0)}, "positive"),
        ({"rates": (float("nan"), 1.0)}, "positive"),
        ({"requests": (10, 0)}, "positive"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 1}, "no gap"),
        ({"batch": 0}, "batch"),
        ({"seed": -1}, "seed -1"),
        ({"budgets": (0,)}, "positive"),
        ({"scale": 0.0}, "positive"),
        ({"engine": "vllm", "scale": 0.1}, "simulated"),
        ({"threshold": 1.5}, "threshold"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, object], said: str) -> None:
    """A typed error that names what is wrong, before anything is started."""
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


def test_one_number_of_requests_stands_for_all_rates() -> None:
    """One, or one each; anything else is refused."""
    assert per_rate([5], [1.0, 2.0]) == (5, 5)
    assert per_rate([5, 6], [1.0, 2.0]) == (5, 6)
    with pytest.raises(ConfigError, match="3 numbers of requests for 2 rates"):
        per_rate([1, 2, 3], [1.0, 2.0])


def test_all_configurations_get_the_same_requests_and_no_two_share_a_prefix() -> None:
    """Arrivals and prompts follow from repeat and rate; all prompts differ within their first tokens."""
    asked = settings(rates=(1.0, 2.0), requests=(4, 4))
    prompts, times = [], []
    for repeat in range(2):
        for rate in range(2):
            plan, again = plan_of(asked, SLO, repeat, rate), plan_of(asked, SLO, repeat, rate)
            assert plan.due(asked.rates[rate]) == again.due(asked.rates[rate])
            assert [plan.prompts.make(i, 0) for i in range(4)] == [again.prompts.make(i, 0) for i in range(4)]
            assert plan.workload.requests == 4
            times.append(tuple(plan.due(asked.rates[rate])))
            prompts += [tuple(plan.prompts.make(i, 0)[:16]) for i in range(4)]
            prompts += [tuple(plan.prompts.fresh(100, serial)[:16]) for serial in range(3)]
    assert len(set(prompts)) == len(prompts)
    assert len(set(times)) == len(times)


def test_the_estimate_grows_with_what_is_measured() -> None:
    """It counts starts, warm-ups, arrivals and last answers of every deployment, and trials."""
    small = estimate(settings(), 2, 1, 0)
    assert estimate(settings(), 2, 2, 0) > small
    assert estimate(settings(), 5, 1, 0) > small
    assert estimate(settings(), 2, 1, 3) > small
    arrivals = sum(count / rate for rate, count in zip(settings().rates, settings().requests, strict=True))
    assert small > 2 * arrivals


def _asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(words)), rest=["--x", "1"])


@pytest.mark.parametrize("engine", ["vllm", "sim"])
def test_defaults_are_a_comparison_that_ends_within_35_minutes(engine: str) -> None:
    """By the command's own estimate: five configurations, their default repeats, three budgets tried."""
    asked = command.settings_of(_asked("--engine", engine))
    assert asked.engine_args == ("--x", "1")
    assert estimate(asked, 5, command.REPEATS[engine], 3) < 35 * 60


def test_rates_alone_keep_the_usual_number_of_requests() -> None:
    """Other rates than the usual ones have one number of requests; given numbers are taken as they are."""
    assert command.settings_of(_asked("--rates", "1", "3")).requests == (15, 15)
    assert command.settings_of(_asked("--rates", "1", "3", "--requests", "4", "5")).requests == (4, 5)
    assert command.settings_of(_asked("--requests", "7")).requests == (7, 7, 7, 7)
