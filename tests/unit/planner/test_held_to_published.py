"""The simulator against published figures: the lines that `python -m pdserve.planner.validate` prints."""

from pathlib import Path

import pytest

from pdserve.planner import held, validate
from pdserve.planner.fit import JOBS, TP4_NAMES, fit_moai, fit_tp4, misfit, tp4_fleet, with_prefill
from pdserve.planner.held import Line
from pdserve.planner.profile import Profile
from pdserve.planner.profile_file import load, shipped
from pdserve.planner.published import Published, load_published
from pdserve.planner.simulator import Mode
from pdserve.rpc.errors import ConfigError


@pytest.fixture(scope="module")
def published() -> Published:
    """The real figures."""
    return load_published()


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    """The shipped ones."""
    return {name: load(name) for name in shipped()}


def missed(lines: list[Line]) -> list[str]:
    """Printed lines that are not held; at least some lines must have a bound."""
    assert any(line.bound for line in lines)
    return [validate.row(line) for line in lines if not line.held]


def test_attainment_at_rate_8(profiles: dict[str, Profile], published: Published) -> None:
    """WRITE 73, READ 70, standard 26 to 30 of 100, within their bounds, and WRITE / 2xTP4 at least 2.2."""
    assert missed(held.at_rate_8(profiles, published)) == []


def test_attainment_at_all_rates(profiles: dict[str, Profile], published: Published) -> None:
    """Fitted on rate 8 alone: READ and WRITE within 8 points at each rate and 2.0 on average, standard within 10
    from 1.5 on. 80 rates, and a mean for each of the four configurations."""
    lines = held.attainment(profiles, published)
    assert len(lines) == 4 * (20 + 1)
    assert missed(lines) == []


def test_best_splits(profiles: dict[str, Profile], published: Published) -> None:
    """Fitted on the first two rows: the best split is the published one in all four."""
    lines = held.ratios(profiles["mi325x"], published)
    assert len(lines) == 4
    assert missed(lines) == []


def test_moai(profiles: dict[str, Profile], published: Published) -> None:
    """1P4D beats 2P3D on 1K/8K, and both throughputs are within 10 %."""
    assert missed(held.moai(profiles["moai"], published)) == []


def test_a_wrong_constant_is_seen(profiles: dict[str, Profile], published: Published) -> None:
    """The bounds are not so wide that anything fits: a prompt token that costs a fifth more misses several."""
    wrong = dict(profiles)
    per_token = validate.tp4_constants(profiles["mi300x"])["prefill_per_token"]
    wrong["mi300x"] = with_prefill(profiles["mi300x"], 1.2 * per_token)
    assert len(missed(held.attainment(wrong, published) + held.at_rate_8(wrong, published))) > 3


def test_the_stored_constants_are_those_of_the_fit(profiles: dict[str, Profile], published: Published) -> None:
    """The profile's fleets are the fit's, and leave the misfit that the profile states. (`--fit` finds them again.)"""
    stored = validate.tp4_constants(profiles["mi300x"])
    values = [stored[name] for name in TP4_NAMES[:-1]] + [1.5]  # the place of 8192
    total = 0.0
    for name, mode in (
        ("read_1P1D", Mode.READ),
        ("write_1P1D", Mode.WRITE),
        ("standard_2xTP4", Mode.COLOCATED),
    ):
        assert held.fleets(profiles)[name] == tp4_fleet(values, mode)
        total += misfit(held.run_at(tp4_fleet(values, mode), 8.0), published.rate8[name])
    assert total == pytest.approx(profiles["mi300x"].fit["objective"], abs=1e-4)
    assert len(JOBS) == 100


def test_the_fit_repeats(published: Published) -> None:
    """The best of the first population is the same twice, and fits worse than what is stored."""
    rate8 = published.rate8
    found = [fit_tp4(rate8["read_1P1D"], rate8["write_1P1D"], rate8["standard_2xTP4"], generations=0) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].objective > float(load("mi300x").fit["objective"])


def test_moais_line_goes_through_both_points(published: Published) -> None:
    """69.3 ms and 0.162 ms a sequence; two splits with equally many decode engines give no line."""
    base, per_seq = fit_moai(dict(published.moai_tokens_per_s))
    assert base == pytest.approx(0.0693, abs=1e-4)
    assert per_seq == pytest.approx(0.162e-3, abs=1e-6)
    with pytest.raises(ConfigError, match="different numbers"):
        fit_moai({"1P4D": 1.0, "2P4D": 1.0})


def test_validate_exits_by_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where all hold, 1 where one is missed, which is marked; 2 without the figures."""
    line = Line("a figure", "1", "2", "+1", "+-1", True)
    monkeypatch.setattr(validate, "everything", lambda *_: {"title": lambda: [line]})
    assert validate.main([]) == 0
    assert "all lines hold" in capsys.readouterr().out
    bad = Line("a figure", "1", "9", "+8", "+-1", False)
    monkeypatch.setattr(validate, "everything", lambda *_: {"title": lambda: [line, bad]})
    assert validate.main([]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "1 missed" in out


def test_without_the_figures_there_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or malformed file is named."""
    assert validate.main(["--data", str(tmp_path)]) == 2
    assert "goodput_rate8.json" in capsys.readouterr().err
    (tmp_path / "goodput_rate8.json").write_text("{}")
    with pytest.raises(ConfigError, match="KeyError"):
        load_published(tmp_path)
