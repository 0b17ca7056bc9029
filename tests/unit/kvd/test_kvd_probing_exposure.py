"""Whether strangers may reach what listens, by the address that it is bound to; how the tables of a kernel are read."""

import os
from pathlib import Path

import pytest

from pdserve.kvd.config import MoriConfig
from pdserve.kvd.probing.exposure import complaint, exposure
from pdserve.kvd.probing.listeners import read_listeners
from pdserve.kvd.probing.values import Exposure, Listener
from pdserve.rpc.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "who"),
    [
        ("127.0.0.1", Exposure.LOOPBACK),
        ("127.8.0.1", Exposure.LOOPBACK),
        ("::1", Exposure.LOOPBACK),
        ("::ffff:127.0.0.1", Exposure.LOOPBACK),
        ("10.1.2.3", Exposure.PRIVATE),
        ("172.16.0.1", Exposure.PRIVATE),
        ("172.31.255.254", Exposure.PRIVATE),
        ("192.168.7.7", Exposure.PRIVATE),
        ("169.254.1.1", Exposure.PRIVATE),
        ("fd12:3456::1", Exposure.PRIVATE),
        ("fe80::1%eth0", Exposure.PRIVATE),
        ("::ffff:10.0.0.1", Exposure.PRIVATE),
        ("0.0.0.0", Exposure.WILDCARD),
        ("::", Exposure.WILDCARD),
        ("::ffff:0.0.0.0", Exposure.WILDCARD),
        ("8.8.8.8", Exposure.PUBLIC),
        ("172.32.0.1", Exposure.PUBLIC),
        ("100.64.0.1", Exposure.PUBLIC),
        ("224.0.0.1", Exposure.PUBLIC),
        ("240.0.0.1", Exposure.PUBLIC),
        ("2606:4700::1", Exposure.PUBLIC),
        ("::ffff:8.8.8.8", Exposure.PUBLIC),
        ("", Exposure.UNKNOWN),
        ("localhost", Exposure.UNKNOWN),
    ],
)
def test_who_may_reach_an_address(address: str, who: Exposure) -> None:
    """Loopback and private addresses are for this host and its network, whatever the family; a wildcard is for all."""
    assert exposure(address) is who


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.1", "172.20.0.1", "192.168.0.1", "169.254.0.1", "100.64.0.1", "0.0.0.0", "8.8.8.8"]
)
def test_what_mori_may_be_bound_to_is_what_passes(host: str) -> None:
    """What `--mori-host` takes for private and what is judged so are the same addresses."""
    try:
        MoriConfig(host=host)
    except ConfigError:
        assert exposure(host) in (Exposure.WILDCARD, Exposure.PUBLIC)
    else:
        assert exposure(host) in (Exposure.LOOPBACK, Exposure.PRIVATE)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Listener("mori", 7, "127.0.0.1", 40, Exposure.LOOPBACK), ""),
        (Listener("mori", 7, "10.0.0.1", 40, Exposure.PRIVATE), ""),
        (Listener("mori", 7), ""),
        (Listener("mori", 7, "0.0.0.0", 40, Exposure.WILDCARD), "every address of this host, 0.0.0.0:40"),
        (Listener("mori", 7, "::", 40, Exposure.WILDCARD), "every address of this host, [::]:40"),
        (Listener("mori", 7, "8.8.8.8", 40, Exposure.PUBLIC), "a public address, 8.8.8.8:40"),
        (Listener("mori", 7, exposure=Exposure.UNKNOWN, why="Permission denied"), "looked at: Permission denied"),
    ],
)
def test_what_is_wrong_with_it(one: Listener, words: str) -> None:
    """Where strangers may reach it, and where that cannot be known: a check that could not be made has not passed."""
    said = complaint(one)
    assert bool(said) == bool(words)
    assert words in said


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def put(root: Path, table: str, *lines: tuple[str, str, int]) -> None:
    """A table of local addresses, states and inodes, of process 7."""
    rest = "00000000:00000000 00:00000000 00000000     0        0"
    rows = [f"   0: {local} 00000000:0000 {state} {rest} {inode} 1 0\n" for local, state, inode in lines]
    (root / "7/net").mkdir(parents=True, exist_ok=True)
    (root / "7/net" / table).write_text(HEAD + "".join(rows))


def test_the_sockets_of_one_process_are_told_from_all_others(tmp_path: Path) -> None:
    """By their inodes; only those that listen, of both families. Addresses as a little-endian kernel has them."""
    (tmp_path / "7/fd").mkdir(parents=True)
    for fd, target in enumerate(("/dev/null", "socket:[11]", "socket:[12]", "socket:[13]", "pipe:[14]")):
        os.symlink(target, tmp_path / f"7/fd/{fd}")
    put(tmp_path, "tcp", ("0100007F:0050", "0A", 11), ("0100000A:1F90", "01", 12), ("00000000:0016", "0A", 99))
    put(tmp_path, "tcp6", ("00000000000000000000000000000000:0FA1", "0A", 13))
    assert read_listeners("mori", 7, root=tmp_path) == (
        Listener("mori", 7, "127.0.0.1", 80, Exposure.LOOPBACK),
        Listener("mori", 7, "::", 4001, Exposure.WILDCARD),
    )
    assert [one.port for one in read_listeners("mori", 7, 80, tmp_path)] == [80]
    assert read_listeners("mori", 7, 81, tmp_path) == (Listener("mori", 7),)
    os.unlink(tmp_path / "7/net/tcp6")  # a kernel without IPv6
    assert [one.port for one in read_listeners("mori", 7, root=tmp_path)] == [80]
    put(tmp_path, "tcp")
    assert read_listeners("mori", 7, root=tmp_path) == (Listener("mori", 7),)


def test_a_process_that_is_gone_and_one_that_may_not_be_looked_at(tmp_path: Path) -> None:
    """The first listens at nothing; of the other that is not known."""
    assert read_listeners("mori", 7, root=tmp_path) == ()
    (tmp_path / "7").mkdir()
    (tmp_path / "7/fd").write_text("")  # not a folder: refused like one that belongs to another user
    (unknown,) = read_listeners("mori", 7, root=tmp_path)
    assert unknown.exposure is Exposure.UNKNOWN
    assert complaint(unknown)
