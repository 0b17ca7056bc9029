"""What the core posts between engines whose KV lies differently. Time and copies by hand."""

from collections.abc import Sequence

import pytest

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.notices import Chunk
from pdserve.kvd.registry import Region
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import PROTOCOL, Division, Layout, MemoryKind, Mode, Part, Span

T = b"transfer-0000001"
LAYERS = 2


def layout(rank: int = 0, ranks: int = 1, block_size: int = 16, heads: int = 2) -> Layout:
    """Token after token, 16 bytes a head."""
    held = max(1, heads // ranks)
    length = block_size * held * 16
    spans = tuple((Span(layer * 16 * length, length, length),) for layer in range(LAYERS))
    parts = (Part("kv", 0, 0, held * 16, 16, 1, 0, 16),)
    return Layout(block_size, 16, spans, Division(rank * heads // ranks, held, heads, parts))


def engine(driver: CoreDriver, engine_id: str, layouts: Sequence[Layout]) -> None:
    """A running engine with this memory."""
    driver.registry.hello(engine_id, len(layouts), PROTOCOL, {"model": "m"})
    for rank, one in enumerate(layouts):
        size = LAYERS * 16 * one.layers[0][0].length
        driver.registry.add_region(engine_id, rank, Region(size, MemoryKind.HOST, one))
    driver.core.regions_changed(engine_id, driver.now)
    driver.take()


def sized(src: int, dst: int) -> CoreDriver:
    """P and C, of one rank and these block sizes."""
    driver = CoreDriver()
    engine(driver, "P", [layout(block_size=src)])
    engine(driver, "C", [layout(block_size=dst)])
    return driver


def ranked(src: int, dst: int, heads: int = 2) -> CoreDriver:
    """P and C, of these ranks and one block size."""
    driver = CoreDriver()
    engine(driver, "P", [layout(rank, src, heads=heads) for rank in range(src)])
    engine(driver, "C", [layout(rank, dst, heads=heads) for rank in range(dst)])
    return driver


def units(driver: CoreDriver) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Source blocks, destination blocks and first unit of what is in flight."""
    return [(post.src_blocks, post.dst_blocks, post.first) for post in driver.posts.values()]


def outcomes(driver: CoreDriver) -> tuple[Outcome, Outcome]:
    """Of producer and consumer."""
    return driver.ends["P", "p"].outcome, driver.ends["C", "c"].outcome


def test_small_blocks_fill_large_ones_as_far_as_they_go() -> None:
    """Three blocks of 16 tokens into two of 32: three units, and the last half block stays as it is."""
    driver = sized(16, 32)
    driver.accept("C", "c", T, (8, 9), "P")
    driver.offer("P", "p", T, (3, 4, 5))
    assert units(driver) == [((3, 4, 5), (8, 8, 9), 0)]
    driver.finish_all()
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)
    assert driver.leases.counts("C", 16).free == 16


def test_what_the_last_block_lacks_counts_once() -> None:
    """A second consumer makes the core look at the first again: it still lands with its last unit, not before."""
    driver = sized(16, 32)
    driver.offer("P", "p", T, (3, 4, 5), consumers=2)
    driver.accept("C", "c", T, (8, 9), "P")
    driver.accept("C", "d", T, (6, 7), "P", consumer=1)
    first, second = sorted(driver.posts)
    assert not driver.ends
    driver.finish(second)
    assert list(driver.ends) == [("C", "d")]
    driver.finish(first)
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_large_blocks_are_cut_from_where_the_consumer_begins() -> None:
    """Two blocks of 32 tokens into blocks of 16, of which the consumer has the first: units 1 to 3."""
    driver = sized(32, 16)
    driver.offer("P", "p", T, (3, 4))
    driver.accept("C", "c", T, (7, 8, 9), "P", first=1)
    assert units(driver) == [((3, 4, 4), (7, 8, 9), 1)]
    driver.finish_all()
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_neither_size_divides_the_other() -> None:
    """Blocks of 48 into blocks of 32: units of 16 tokens."""
    driver = sized(48, 32)
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, (7, 8), "P")
    assert units(driver) == [((3, 3, 3), (7, 7, 8), 0)]


@pytest.mark.parametrize(("src", "dst", "offered", "wanted"), [(16, 32, 3, 3), (32, 16, 2, 5)])
def test_more_than_is_on_offer_is_refused(src: int, dst: int, offered: int, wanted: int) -> None:
    """A consumer that wants a block of which the prompt has no token gets none."""
    driver = sized(src, dst)
    driver.offer("P", "p", T, tuple(range(offered)))
    driver.accept("C", "c", T, tuple(range(wanted)), "P")
    assert not driver.posts
    assert driver.ends["C", "c"].reason == "INVALID_REQUEST"
    assert "are on offer" in driver.ends["C", "c"].detail


def test_write_posts_whole_source_blocks_as_they_are_computed() -> None:
    """Blocks of 16 into blocks of 32: each goes when it is ready, into its half; what the last half lacks is not waited
    for once the offer has come."""
    driver = sized(16, 32)
    driver.accept("C", "c", T, (8, 9), "P", mode=Mode.WRITE)
    driver.begin("P", "p", T)
    seen = []
    for number, block in enumerate((3, 4, 5)):
        driver.step("P", number + 1, Chunk("p", 0, number, (block,), number + 1), layers=(0, 1))
        seen += units(driver)
        driver.finish_all()
    assert seen == [((3,), (8,), 0)] * 2 + [((4,), (8,), 1)] * 2 + [((5,), (9,), 2)] * 2
    assert not driver.ends
    driver.offer("P", "p", T, (3, 4, 5), mode=Mode.WRITE)
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_a_lost_notice_costs_nothing_but_overlap() -> None:
    """The offer brings what no notice has told of, and no unit goes twice."""
    driver = sized(32, 16)
    driver.accept("C", "c", T, (6, 7, 8, 9), "P", mode=Mode.WRITE)
    driver.begin("P", "p", T)
    driver.step("P", 1, Chunk("p", 0, 0, (3, 4), 1), layers=(1,), end=False)
    assert units(driver) == [((3, 3), (6, 7), 0)]
    driver.offer("P", "p", T, (3, 4), mode=Mode.WRITE)
    by_layer = sorted((post.layers, post.first, post.src_blocks) for post in driver.posts.values())
    assert by_layer == [((0,), 0, (3, 3, 4, 4)), ((1,), 0, (3, 3)), ((1,), 2, (4, 4))]
    driver.finish_all()
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_a_preempted_producer_starts_again() -> None:
    """What the first attempt had posted counts for nothing, also where the last block was short."""
    driver = sized(16, 32)
    driver.accept("C", "c", T, (8, 9), "P", mode=Mode.WRITE)
    driver.begin("P", "p", T)
    driver.step("P", 1, Chunk("p", 0, 0, (3, 4), 2), layers=(0, 1))
    driver.finish_all()
    driver.retract("P", "p", final=False)
    driver.offer("P", "p", T, (10, 11, 12), mode=Mode.WRITE, attempt=1)
    assert units(driver) == [((10, 11, 12), (8, 8, 9), 0)]
    driver.finish_all()
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


@pytest.mark.parametrize(("src", "dst", "pairs"), [(2, 1, [(0, 0), (1, 0)]), (1, 2, [(0, 0), (0, 1)])])
def test_every_pair_of_ranks_must_land(src: int, dst: int, pairs: list[tuple[int, int]]) -> None:
    """Two ranks to one and back: a copy for each pair, and the end comes after the last of them."""
    driver = ranked(src, dst)
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, (5,), "P")
    assert sorted((post.src.rank, post.dst.rank) for post in driver.posts.values()) == pairs
    driver.finish(min(driver.posts))
    assert not driver.ends
    driver.finish_all()
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_a_layer_of_one_rank_goes_to_all_that_take_from_it() -> None:
    """WRITE from two ranks to four: rank 1's layer is posted to ranks 2 and 3 when rank 1 has computed it."""
    driver = ranked(2, 4, heads=4)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.begin("P", "p", T)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), rank=1, layers=(0,), end=False)
    assert [(p.src.rank, p.dst.rank, p.layers) for p in driver.posts.values()] == [(1, 2, (0,)), (1, 3, (0,))]
    driver.finish_all()
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    driver.finish_all()
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_a_rank_that_has_nothing_of_its_own_gives_nothing() -> None:
    """One head on two ranks to one rank: rank 0 gives it, and rank 1's notices move nothing."""
    driver = ranked(2, 1, heads=1)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.begin("P", "p", T)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), rank=1, layers=(0, 1))
    assert not driver.posts
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0, 1))
    assert [(p.src.rank, p.dst.rank) for p in driver.posts.values()] == [(0, 0), (0, 0)]
    driver.finish_all()
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    assert not driver.posts
    assert outcomes(driver) == (Outcome.RELEASED, Outcome.LANDED)


def test_what_does_not_fit_is_refused_when_it_is_accepted() -> None:
    """In WRITE before prefill has begun anything; the refusal has both layouts."""
    driver = CoreDriver()
    engine(driver, "P", [layout(heads=2)])
    engine(driver, "C", [layout(heads=4)])
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    end = driver.ends["C", "c"]
    assert end.reason == "INCOMPATIBLE_ENGINES"
    for said in ("kv_heads: 2 != 4", "source: 1 rank of 2 of 2 KV heads", "destination: 1 rank of 4 of 4 KV heads"):
        assert said in end.detail
