"""Keys, addresses and flags: what cannot work is refused before anything starts."""

import argparse
import enum
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pdserve.rpc.errors import ConfigError
from pdserve.runtime import config, flags
from pdserve.runtime.config import INSECURE_KEY, ClusterKey


class Colour(enum.Enum):
    """For flags."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Sample:
    """What a flag can be.

    More words that are not the title.
    """

    name: str
    """Who it is."""
    port: int = 7000
    """Where it listens,
    on one line."""
    share: float = 0.5
    """How much: 50%."""
    path: Path | None = None
    """A file."""
    colour: Colour = Colour.RED
    """Its colour."""
    loud: bool = False
    """Whether it shouts."""
    tags: tuple[str, ...] = ()
    """Any number."""

    def __post_init__(self) -> None:
        """Refuses port 1."""
        if self.port == 1:
            raise ValueError("port 1 is reserved")


@dataclass(frozen=True, slots=True)
class Nested:
    """Has a config inside."""

    size: int = 1
    """Of it."""
    sample: Sample = Sample("inner")  # frozen
    """What is inside."""


def parse(*argv: str, prefix: str = "") -> Sample:
    """What the flags make."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_flags(parser, Sample, prefix)
    return flags.from_args(Sample, parser.parse_args(argv), prefix)


def test_flags_become_fields_of_their_types() -> None:
    """Every supported type comes through, and defaults stay those of the dataclass."""
    assert parse("--name", "a") == Sample("a")
    full = parse(
        *("--name", "a", "--port", "5", "--share", "0.25", "--path", "/x", "--colour", "blue", "--loud"),
        *("--tags", "one", "--tags", "two"),
    )
    assert full == Sample("a", 5, 0.25, Path("/x"), Colour.BLUE, True, ("one", "two"))


def test_flags_take_a_prefix() -> None:
    """Two configs can share one command line."""
    assert parse("--sim-name", "a", "--sim-port", "5", prefix="sim-") == Sample("a", 5)


def test_a_config_inside_a_config_has_flags_of_its_own() -> None:
    """What is not given stays as the outer default has it; skipped fields take fixed values."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_flags(parser, Nested, "sim-", skip=("size",))
    args = parser.parse_args(["--sim-sample-name", "x", "--sim-sample-port", "9"])
    assert flags.from_args(Nested, args, "sim-", size=4) == Nested(4, Sample("x", 9))
    with pytest.raises(SystemExit):
        parser.parse_args(["--sim-size", "3"])


def test_help_is_the_line_under_the_field() -> None:
    """The code documents the flags; a percent sign in it is text."""
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, Sample)
    text = " ".join(parser.format_help().split())
    assert "Where it listens, on one line. Default: 7000." in text
    assert "How much: 50%." in text
    assert "What a flag can be" in text


@pytest.mark.parametrize("argv", [[], ["--name", "a", "--colour", "green"], ["--name", "a", "--port", "x"], ["--nam"]])
def test_bad_flags_end_the_process(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, unknown and mistyped flags end it with argparse's status."""
    with pytest.raises(SystemExit) as raised:
        parse(*argv)
    assert raised.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_value_that_the_config_refuses_is_a_config_error() -> None:
    """The dataclass validates itself once."""
    with pytest.raises(ConfigError, match="port 1 is reserved"):
        parse("--name", "a", "--port", "1")


def test_unknown_and_missing_keys_of_a_map_are_refused() -> None:
    """Neither is guessed nor ignored."""
    assert flags.from_mapping(Sample, {"name": "a", "colour": "blue"}) == Sample("a", colour=Colour.BLUE)
    with pytest.raises(ConfigError, match="no nmae"):
        flags.from_mapping(Sample, {"name": "a", "nmae": "b"})
    with pytest.raises(ConfigError, match="name"):
        flags.from_mapping(Sample, {})


def test_what_follows_two_dashes_is_passed_through() -> None:
    """Only the first `--` divides."""
    assert flags.split_passthrough(["--a", "--", "--b", "--", "c"]) == (["--a"], ["--b", "--", "c"])
    assert flags.split_passthrough(["--a"]) == (["--a"], [])


def test_the_cluster_key_comes_from_the_flag_then_the_environment(tmp_path: Path) -> None:
    """White space round it is not part of it; without one it is the key that everybody knows."""
    one, two = tmp_path / "one", tmp_path / "two"
    for file in (one, two):
        file.touch(0o600)
    one.write_bytes(b"first key of some length\n")
    two.write_bytes(b"second key of some length")
    environ = {config.KEY_FILE_VARIABLE: str(two)}
    assert config.load_cluster_key(one, environ) == ClusterKey(b"first key of some length", given=True)
    assert config.load_cluster_key(None, environ) == ClusterKey(b"second key of some length", given=True)
    assert config.load_cluster_key(None, {}) == ClusterKey(INSECURE_KEY, given=False)


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_a_bad_key_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty or short one never falls back to no key."""
    path = tmp_path / "key"
    if content is not None:
        path.touch(0o600)
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="No such file" if content is None else "at least 16"):
        config.load_cluster_key(path, {})


def test_a_key_file_that_others_may_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where we can mend that; a mounted secret is used, and a warning says so at every start."""
    path = tmp_path / "key"
    path.write_bytes(b"a key that is long enough")
    path.chmod(0o444)
    with pytest.raises(ConfigError, match=r"mode 0444.*: chmod 600"):
        config.load_cluster_key(path, {})
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with capture_logs() as logs:
        assert config.load_cluster_key(path, {}).given
    assert [(line["event"], line["log_level"]) for line in logs] == [("cluster_key_exposed", "warning")]
    assert "mode 0444" in logs[0]["why"]


def test_a_key_does_not_show_itself() -> None:
    """Not in logs, not in tracebacks."""
    assert "secret" not in repr(ClusterKey(b"secret", given=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "unix:/run/x"])
def test_loopback_needs_no_key(host: str) -> None:
    """Only this host can reach it."""
    config.check_bind(host, ClusterKey(INSECURE_KEY, given=False), insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node7"])
def test_the_network_needs_a_key_or_insecure(host: str) -> None:
    """Without either it is refused; --insecure is said in the log each time."""
    without, given = ClusterKey(INSECURE_KEY, given=False), ClusterKey(b"k" * 32, given=True)
    with pytest.raises(ConfigError, match="--insecure"):
        config.check_bind(host, without, insecure=False)
    config.check_bind(host, given, insecure=False)
    with capture_logs() as logs:
        config.check_bind(host, without, insecure=True)
    assert [(line["event"], line["log_level"]) for line in logs] == [("insecure", "warning")]


def test_a_long_socket_path_is_refused() -> None:
    """Linux takes 107 bytes."""
    config.check_socket_path("/" + "a" * 106)
    with pytest.raises(ConfigError, match="108 bytes"):
        config.check_socket_path("/" + "é" * 53 + "a")


@pytest.mark.parametrize(("address", "parts"), [("h:1", ("h", 1)), ("[::1]:65535", ("::1", 65535))])
def test_addresses_split_and_join(address: str, parts: tuple[str, int]) -> None:
    """Both ways, with IPv6 in brackets."""
    assert config.split_address(address) == parts
    assert config.join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "::1:5", "h:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    """By name, before anything dials it."""
    with pytest.raises(ConfigError, match="HOST:PORT"):
        config.split_address(address)


def test_a_wildcard_is_not_advertised() -> None:
    """Peers get the address from which this host reaches them; a plain address stays."""
    assert config.advertised_host("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert config.advertised_host("10.0.0.9", "127.0.0.1") == "10.0.0.9"
    assert config.advertised_host("node7", "127.0.0.1") == "node7"
