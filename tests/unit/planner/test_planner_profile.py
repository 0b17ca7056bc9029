"""Profiles: what is shipped loads, a round trip loses nothing, and what is wrong is refused by name."""

from pathlib import Path

import pytest

from pdserve.planner.profile import Profile
from pdserve.planner.profile_file import dumps, load, parse, shipped
from pdserve.planner.simulator import Job, Mode, Role, Routing, simulate
from pdserve.rpc.errors import ConfigError

TEXT = dumps(load("mi300x"))


def test_what_is_shipped() -> None:
    """The published deployments are there; each profile says where its numbers come from."""
    assert {"mi300x", "mi300x-tp8", "mi325x", "moai"} <= set(shipped())
    for name in shipped():
        profile = load(name)
        assert profile.name == name
        assert profile.source
        assert profile.fit["how"]
        for role in (profile.prefill, profile.decode, profile.colocated):
            assert role is None or role.source


@pytest.mark.parametrize("name", shipped())
def test_a_round_trip_loses_nothing(name: str) -> None:
    """What is written is read back as the same profile, also with quotes and line ends in its words."""
    profile = load(name)
    assert parse(dumps(profile)) == profile
    odd = Profile('a "b"\n\\c', "x", "y", colocated=load("mi300x").colocated)
    assert parse(dumps(odd)) == odd


def test_a_file_by_path(tmp_path: Path) -> None:
    """Any file, by its path."""
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace('name = "mi300x"', 'name = "mine"'))
    assert load(path).name == "mine"


def test_fleets() -> None:
    """A profile makes the fleets whose roles it has, and says what it lacks."""
    fleet = load("mi300x").fleet(Mode.WRITE, prefills=2, decodes=3)
    assert [fleet.roles.count(role) for role in (Role.PREFILL, Role.DECODE)] == [2, 3]
    assert fleet.label == "2P3D write"
    assert fleet.routing is Routing.ROUND_ROBIN
    assert load("mi300x-tp8").fleet(Mode.COLOCATED, engines=2).label == "2x colocated"
    with pytest.raises(ConfigError, match="no numbers for prefill and decode"):
        load("mi300x-tp8").fleet(Mode.READ, prefills=1, decodes=1)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "mi300x"\n', "", "name is missing"),
        ('name = "mi300x"\n', "name = 3\n", "name must be text"),
        ("[proxy]", "colour = 1\n[proxy]", "unknown colour"),
        ("[proxy]", "[proxies]", "unknown proxies"),
        ("[prefill]", "max_model_len = 1\n[prefill]", "max_model_len must be at least 2"),
        ("tail =", "tail_write = -1.0\ntail =", "tail_write must be 0 or more"),
        ("[proxy]", "[proxy]\nspeed = 1", r"\[proxy\]: unknown speed"),
        ("decode_base = 0.02389\n", "", "decode_base is missing"),
        ("decode_base = 0.02389", 'decode_base = "fast"', "decode_base must be a number"),
        ("decode_base = 0.02389", "decode_base = -1.0", "decode_base must be 0 or more"),
        ("decode_base = 0.02389", "decode_base = nan", "decode_base must be a number"),
        ("token_budget = 8192", "token_budget = 8192.5", "token_budget must be a whole number"),
        ("max_seqs = 1024", "max_seqs = 9000", "decodes in every step"),
        ("accelerators = 4", "accelerators = 0", "accelerators must be at least 1"),
        ('routing = "round_robin"', 'routing = "random"', "one of least_load, round_robin"),
        ('first_token = "decode"', 'first_token = "both"', "first_token"),
        ('first_token = "decode"', 'first_token = "nobody"', "one of prefill, decode, both"),
        ("[decode]", "[colocated2]", "unknown colocated2|come together"),
        ("[handover]", "[handover", "not TOML"),
    ],
)
def test_what_is_wrong_is_refused_by_name(old: str, new: str, says: str) -> None:
    """Unknown and missing keys, wrong kinds, impossible values."""
    assert old in TEXT
    with pytest.raises(ConfigError, match=says):
        parse(TEXT.replace(old, new))


def test_a_profile_without_engines_or_file_is_refused(tmp_path: Path) -> None:
    """No role at all; no such file; not text."""
    with pytest.raises(ConfigError, match="none of"):
        parse('name = "a"\nabout = "b"\nsource = "c"\n')
    with pytest.raises(ConfigError, match="neither shipped"):
        load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load(tmp_path / "binary.toml")


def test_context_and_tail_of_write_may_be_left_out() -> None:
    """A profile without them has no bound on a request, and one tail for both modes; with them they are read, written
    and used: WRITE's hand-over takes its own tail, READ's the other."""
    plain = parse(TEXT)
    assert plain.max_model_len is None
    assert "max_model_len" not in dumps(plain)
    assert "tail_write" not in dumps(plain)
    told = parse(
        TEXT.replace("[prefill]", "max_model_len = 4096\n[prefill]").replace("tail =", "tail_write = 0.5\ntail =")
    )
    assert told.max_model_len == 4096
    assert parse(dumps(told)) == told
    for mode, more in ((Mode.READ, 0.0), (Mode.WRITE, 0.5 - plain.handover.tail)):
        alone = [
            simulate(profile.fleet(mode, prefills=1, decodes=1), [Job(100, 5)]).served[0].ttft
            for profile in (plain, told)
        ]
        assert alone[1] - alone[0] == pytest.approx(more)
