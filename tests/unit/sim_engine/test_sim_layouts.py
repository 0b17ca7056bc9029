"""Simulated engines whose KV lies differently, and a real kvd between them: every byte is checked by the engines."""

import asyncio
from typing import Any

import pytest

from pdserve.engine.port import Request
from pdserve.engine.sim import SimConfig
from pdserve.engine.sim.config import KvOrder
from pdserve.kvd.testing import Fault
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import ConfigError, EngineDied, IncompatibleEngines

MODES = pytest.mark.parametrize("mode", list(Mode), ids=["read", "write"])
LENGTHS = (1, 15, 16, 17, 33, 40, 100, 161)


def shape(ranks: int = 1, block_size: int = 16, order: str = "tokens", heads: int = 4, **more: Any) -> SimConfig:
    """16 bytes a token and head, whatever the ranks and blocks."""
    held = max(1, heads // ranks)
    return SimConfig(
        layers=3,
        ranks=ranks,
        kv_heads=heads,
        kv_order=KvOrder(order),
        block_size=block_size,
        block_bytes=16 * held * block_size,
        token_budget=40,
        **more,
    )


SHAPES: dict[str, tuple[SimConfig, SimConfig]] = {
    "ranks 2 to 1": (shape(2), shape(1)),
    "ranks 1 to 2": (shape(1), shape(2)),
    "ranks 2 to 4": (shape(2), shape(4)),
    "ranks 4 to 2, heads first": (shape(4, order="heads"), shape(2, order="heads")),
    "more ranks than heads, 8 to 2": (shape(8), shape(2)),
    "more ranks than heads, 2 to 8": (shape(2), shape(8)),
    "a latent, 2 to 1": (shape(2, heads=1), shape(1, heads=1)),
    "a latent, 1 to 2": (shape(1, heads=1), shape(2, heads=1)),
    "blocks 16 to 32": (shape(), shape(block_size=32)),
    "blocks 32 to 16": (shape(block_size=32), shape()),
    "blocks 48 to 32": (shape(block_size=48), shape(block_size=32)),
    "tokens to heads": (shape(order="tokens"), shape(order="heads")),
    "joined to apart": (shape(), shape(order="apart")),
    "apart to heads": (shape(order="apart"), shape(order="heads")),
    "everything": (shape(4, 16, "heads", num_blocks=64), shape(2, 48, "apart", num_blocks=40)),
    "everything, back": (shape(2, 48, "apart", num_blocks=40), shape(4, 16, "heads", num_blocks=64)),
}
ALL_SHAPES = pytest.mark.parametrize(("src", "dst"), list(SHAPES.values()), ids=list(SHAPES))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * i * i + i) % 250 for i in range(length)]


@MODES
@ALL_SHAPES
async def test_the_text_is_that_of_one_engine(
    cluster: Any, helpers: Any, src: SimConfig, dst: SimConfig, mode: Mode
) -> None:
    """Prompts of one token to several blocks, computed in chunks: every byte that decode gets is the one that it would
    have computed, and every block comes back."""
    p, d = await cluster.engine(src), await cluster.engine(dst)
    for length in LENGTHS:
        tokens = prompt(length, length)  # no prefix in common
        alone = await helpers.collect(p, Request(f"alone {length}", tuple(tokens), helpers.GREEDY))
        _, got = await cluster.hand_over(p, d, tokens, mode)
        assert helpers.text(got) == helpers.text(alone)
        assert got[-1].recomputed_tokens == 0
    await cluster.idle()
    assert p.corrupt == d.corrupt == 0


@MODES
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (48, 32)])
async def test_a_prefix_that_decode_has_is_left_alone(
    cluster: Any, helpers: Any, sizes: tuple[int, int], mode: Mode
) -> None:
    """Decode begins in the middle of a source block: its cached blocks are not written."""
    p, d = await cluster.engine(shape(2, sizes[0])), await cluster.engine(shape(1, sizes[1]))
    short, long = prompt(70), prompt(70) + prompt(60, 5)
    await helpers.collect(d, Request("before", tuple(short), helpers.GREEDY))
    alone = await helpers.collect(p, Request("alone", tuple(long), helpers.GREEDY))
    _, got = await cluster.hand_over(p, d, long, mode)
    assert helpers.text(got) == helpers.text(alone)
    assert got[-1].cached_tokens == 70 // sizes[1] * sizes[1]
    await cluster.idle()
    assert p.corrupt == d.corrupt == 0


@MODES
async def test_two_consumers_of_two_layouts(cluster: Any, helpers: Any, mode: Mode) -> None:
    """One prompt for two engines that lie differently from the producer and from each other."""
    p = await cluster.engine(shape(2))
    one, other = await cluster.engine(shape(1, 32)), await cluster.engine(shape(4, 48, "heads"))
    tid = helpers.transfer_id()
    producing = asyncio.create_task(helpers.collect(p, cluster.produce(prompt(90), mode, tid, consumers=2)))
    if mode is Mode.READ:
        await producing
    legs = [cluster.consume(p, prompt(90), mode, tid, consumer=i) for i in range(2)]
    answers = await asyncio.gather(helpers.collect(one, legs[0]), helpers.collect(other, legs[1]))
    await producing
    assert helpers.text(answers[0]) == helpers.text(answers[1])
    await cluster.idle()
    assert p.corrupt == one.corrupt == other.corrupt == 0


@MODES
async def test_many_at_once_over_small_pools(cluster: Any, helpers: Any, mode: Mode) -> None:
    """Forty hand-overs from two ranks to one of another block size, through pools that hold a few."""
    p = await cluster.engine(shape(2, num_blocks=24))
    d = await cluster.engine(shape(1, 32, num_blocks=12))
    legs = [cluster.hand_over(p, d, prompt(10 + 3 * i, i), mode, recompute=True) for i in range(40)]
    for index, (_, got) in enumerate(await asyncio.gather(*legs)):
        assert sum(len(o.token_ids) for o in got) == 8, index
    await cluster.idle()
    assert p.corrupt == d.corrupt == 0


@MODES
@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_a_mover_that_lies_is_found_out(faulty: Any, mode: Mode, fault: Fault) -> None:
    """Negative control: what is not copied, or copied from elsewhere, is seen across layouts too."""
    p, d = await faulty.engine(shape(2)), await faulty.engine(shape(1, 32))
    faulty.kvd.faults.script = [fault] * 50
    with pytest.raises(EngineDied, match="corrupt KV before its first step"):
        await faulty.hand_over(p, d, prompt(64), mode)
    assert d.corrupt == 1
    await faulty.idle()


async def test_only_what_the_prompt_has_is_moved(cluster: Any, helpers: Any) -> None:
    """40 tokens from blocks of 16 into blocks of 32: three source blocks' bytes, on each rank its heads'."""
    p, d = await cluster.engine(shape(2)), await cluster.engine(shape(1, 32))
    await cluster.hand_over(p, d, prompt(40), Mode.READ)
    await cluster.idle()
    ended = list(cluster.kvd.node.transfers.book.ended_handles.values())
    assert {end.facts.kv_bytes for end in ended} == {48 * 4 * 16 * 3}


async def test_what_cannot_be_converted_is_refused_by_name(cluster: Any, helpers: Any) -> None:
    """Other heads: refused, with what differs and both layouts."""
    p, d = await cluster.engine(shape(2)), await cluster.engine(shape(1, heads=2))
    tid = helpers.transfer_id()
    await helpers.collect(p, cluster.produce(prompt(20), Mode.READ, tid))
    with pytest.raises(IncompatibleEngines) as caught:
        await helpers.collect(d, cluster.consume(p, prompt(20), Mode.READ, tid))
    for said in ("kv_heads: 4 != 2", p.info.layout, d.info.layout):
        assert said in caught.value.message
    await cluster.idle()


@pytest.mark.parametrize(
    "values",
    [
        {"kv_heads": 3, "ranks": 2},
        {"kv_heads": -1},
        {"block_bytes": 128, "kv_heads": 2},
        {"kv_order": KvOrder.APART, "block_bytes": 128},
    ],
)
def test_impossible_layouts_are_refused(values: dict[str, Any]) -> None:
    """Heads that ranks cannot divide, and bytes that heads cannot."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        SimConfig(**values)
