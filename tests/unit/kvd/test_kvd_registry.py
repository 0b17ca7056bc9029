"""Engines and regions."""

import pytest

from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.types import PROTOCOL, Layout, MemoryKind, Span
from pdserve.rpc.errors import IncompatibleEngines, InvalidRequest, StaleEpoch


def region(blocks: int = 4, block_size: int = 16, size: int | None = None) -> Region:
    """One layer of 64 bytes a block."""
    layout = Layout(block_size, blocks, ((Span(0, 64, 64),),))
    return Region(blocks * 64 if size is None else size, MemoryKind.HOST, layout)


def test_an_engine_is_mapped_when_every_rank_is() -> None:
    """Two ranks: one region is not enough, in whichever order hello and regions come."""
    registry = Registry()
    registry.add_region("e", 1, region())
    entry = registry.hello("e", 2, PROTOCOL, {"model": "m"})
    assert not entry.mapped
    registry.add_region("e", 0, region(blocks=3))
    assert entry.mapped
    assert entry.num_blocks == 3


def test_participants_must_agree_on_what_the_engine_is() -> None:
    """A second hello that contradicts the first is refused and names what differs."""
    registry = Registry()
    registry.hello("e", 1, PROTOCOL, {"model": "m"})
    registry.hello("e", 1, PROTOCOL, {"model": "m"})
    with pytest.raises(InvalidRequest) as caught:
        registry.hello("e", 2, PROTOCOL, {"model": "x"})
    assert caught.value.metadata == {"model": "m != x", "ranks": "1 != 2"}


def test_another_protocol_is_refused() -> None:
    """A connector of another version cannot attach."""
    with pytest.raises(IncompatibleEngines, match="protocol"):
        Registry().hello("e", 1, PROTOCOL + 1, {})


@pytest.mark.parametrize(
    ("rank", "given"),
    [
        (0, region(size=100)),
        (2, region()),
        (0, region(block_size=32)),
        (0, Region(64, MemoryKind.HOST, Layout(16, 1, ()))),
    ],
)
def test_a_region_that_cannot_be_is_refused(rank: int, given: Region) -> None:
    """Too small for its layout, of no rank, of another block size than the identity, or empty."""
    registry = Registry()
    registry.hello("e", 2, PROTOCOL, {"block_size": "16"})
    with pytest.raises(InvalidRequest):
        registry.add_region("e", rank, given)
    entry = registry.get("e")
    assert entry is not None
    assert not entry.regions


def test_a_rank_has_one_region() -> None:
    """Registering again is refused; the first stays."""
    registry = Registry()
    registry.add_region("e", 0, region())
    with pytest.raises(InvalidRequest, match="before"):
        registry.add_region("e", 0, region())


def test_an_ended_engine_id_is_never_taken_again() -> None:
    """Hello, region and use of an ended epoch are stale, before and after its memory is gone."""
    registry = Registry()
    registry.hello("e", 1, PROTOCOL, {})
    assert registry.end("e")
    assert not registry.end("e")
    for _ in range(2):
        with pytest.raises(StaleEpoch):
            registry.hello("e", 1, PROTOCOL, {})
        with pytest.raises(StaleEpoch):
            registry.add_region("e", 0, region())
        with pytest.raises(StaleEpoch, match="has ended"):
            registry.live("e")
        registry.forget("e")
    with pytest.raises(StaleEpoch, match="not known"):
        registry.live("other")
