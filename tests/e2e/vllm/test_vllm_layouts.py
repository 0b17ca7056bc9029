"""Hand-over between vLLM engines whose KV lies differently: ranks, block sizes, and both. Tokens as from one engine."""

import asyncio
import contextlib
import mmap
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.port import Sampling
from pdserve.engine.vllm.testing_pair import FIRST, GREEDY, WAIT_S, Handover, KvdOperator, Pair, Prompt, ask
from pdserve.engine.vllm.testing_pool import EnginePool, open_pair
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import IncompatibleEngines
from tests.e2e.vllm.kinds import NO_CACHE, latent, small, usual

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test of each shape starts its engines
]

SHORT = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
Prompts = Callable[[int], Prompt]
MODES = pytest.mark.parametrize("mode", Mode)
BACK = pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
HEAD_BYTES = 32 * 2 * 32 * 4
"""Of one head in a block of 32 tokens, float32."""


async def same(pair: Pair, mode: Mode, tokens: Prompt) -> None:
    """One prompt over both engines; the answer is decode's own."""
    alone = await ask(pair.decode, tokens, SHORT)
    both = await pair.hand_over(mode, tokens, SHORT)
    assert both.consumed.tokens == alone.tokens
    assert both.consumed.last.recomputed_tokens == 0
    assert both.landed.facts.kv_bytes > 0


@pytest_asyncio.fixture(loop_scope="session")
async def ranks(pool: EnginePool, llama: Path) -> AsyncIterator[Pair]:
    """Two ranks with a KV head each, and one with both."""
    async with pool.pair(small(llama, 32, NO_CACHE, ranks=2), small(llama, 32, NO_CACHE, core=1)) as pair:
        yield pair


@MODES
@BACK
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 200])
async def test_two_ranks_and_one(ranks: Pair, prompt: Prompts, back: bool, mode: Mode, length: int) -> None:
    """Each head of each layer goes where it is computed on, from two ranks to one and from one to two."""
    await same(ranks.back() if back else ranks, mode, prompt(length))


async def test_bytes_are_moved_once(ranks: Pair, prompt: Prompts) -> None:
    """Both ranks' halves are one whole prompt: four blocks of three layers with two heads."""
    both = await ranks.hand_over(Mode.READ, prompt(100), SHORT)
    assert both.landed.facts.kv_bytes == 4 * 3 * 2 * HEAD_BYTES


async def test_the_second_rank_computes_on_its_own_head(ranks: Pair, prompt: Prompts) -> None:
    """The negative control: wrong bytes in head 1 alone of the source, which rank 1 takes, change the answer."""
    pair, tokens = ranks.back(), prompt(120)
    alone = await ask(pair.decode, tokens, GREEDY)
    produce = pair.produce(Mode.READ)
    offered = (await ask(pair.prefill, tokens, FIRST, produce)).last
    held = await pair.kvd.leased(produce.transfer_id)
    with pair.prefill.memory().open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for layer in range(3):
            for block in held:
                start = (layer * (pair.prefill.info.num_blocks + 1) + block) * 2 * HEAD_BYTES + HEAD_BYTES
                memory[start : start + HEAD_BYTES] = bytes([0x3F, 0x11]) * (HEAD_BYTES // 2)
    consumed = await ask(pair.decode, tokens, GREEDY, pair.consume(produce, offered))
    assert consumed.tokens != alone.tokens


@pytest_asyncio.fixture(loop_scope="session")
async def sizes(pool: EnginePool, llama: Path) -> AsyncIterator[Pair]:
    """Blocks of 32 tokens and of 64, pools of unequal size, prefix caches."""
    async with pool.pair(usual(llama, 0), small(llama, 64, core=1, megabytes=3)) as pair:
        yield pair


@MODES
@BACK
@pytest.mark.parametrize("length", [1, 32, 33, 63, 64, 65, 100, 200])
async def test_blocks_of_32_and_64(sizes: Pair, prompt: Prompts, back: bool, mode: Mode, length: int) -> None:
    """Prompts that end in the first and in the second half of a large block."""
    pair, tokens = (sizes.back() if back else sizes), prompt(length)
    both = await pair.hand_over(mode, tokens, SHORT)
    assert both.consumed.last.recomputed_tokens == 0
    assert both.landed.facts.kv_bytes > 0
    assert both.consumed.tokens == (await ask(pair.decode, tokens, SHORT)).tokens
    assert both.consumed.tokens == (await ask(pair.prefill, tokens, SHORT)).tokens


@MODES
async def test_a_prefix_in_the_middle_of_a_block(sizes: Pair, prompt: Prompts, mode: Mode) -> None:
    """Decode has the first 32 tokens, half of the source's first block, and takes the rest."""
    pair, shared = sizes.back(), prompt(32)
    tokens = shared + prompt(100)
    await ask(pair.decode, shared + prompt(1), SHORT)
    both = await pair.hand_over(mode, tokens, SHORT)
    assert both.consumed.last.cached_tokens == 32
    assert both.consumed.tokens == (await ask(pair.prefill, tokens, SHORT)).tokens
    assert both.landed.facts.kv_bytes == (5 - 1) * 3 * 2 * HEAD_BYTES


@pytest_asyncio.fixture(loop_scope="session")
async def both_differ(pool: EnginePool, llama: Path) -> AsyncIterator[Pair]:
    """Two ranks with blocks of 64 tokens, one rank with blocks of 32."""
    async with pool.pair(small(llama, 64, NO_CACHE, ranks=2), small(llama, 32, NO_CACHE, core=1)) as pair:
        yield pair


@MODES
@BACK
async def test_ranks_and_blocks_at_once(both_differ: Pair, prompt: Prompts, back: bool, mode: Mode) -> None:
    """Heads are split and blocks cut in one plan."""
    await same(both_differ.back() if back else both_differ, mode, prompt(150))


@pytest_asyncio.fixture(loop_scope="session")
async def latents(pool: EnginePool, mla: Path) -> AsyncIterator[Pair]:
    """MLA: two ranks that hold the same latent, and one."""
    async with pool.pair(latent(mla, ranks=2), latent(mla, core=1)) as pair:
        yield pair


@MODES
@BACK
async def test_mla_on_two_ranks_and_one(latents: Pair, prompt: Prompts, back: bool, mode: Mode) -> None:
    """The latent comes from one of the ranks that hold it, and goes to each that wants it."""
    await same(latents.back() if back else latents, mode, prompt(100))


@pytest_asyncio.fixture(loop_scope="session")
async def halves(pool: EnginePool, llama: Path) -> AsyncIterator[Pair]:
    """bfloat16, which the kernel packs in tiles where the processor has AMX."""
    more = ("--dtype", "bfloat16", NO_CACHE)
    async with pool.pair(small(llama, 32, *more), small(llama, 64, *more, core=1)) as pair:
        yield pair


@MODES
@BACK
@pytest.mark.parametrize("length", [33, 150])
async def test_blocks_of_bfloat16(halves: Pair, prompt: Prompts, back: bool, mode: Mode, length: int) -> None:
    """Tiles of 32 tokens are moved whole, from blocks of 32 tokens to blocks of 64 and back."""
    await same(halves.back() if back else halves, mode, prompt(length))


@contextlib.asynccontextmanager
async def node() -> AsyncIterator[KvdOperator]:
    """One more daemon, that reads from others over nixl and TCP."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="pdsv") as folder:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        flags = ("--transport", "nixl", "--nixl-tls", "tcp", "--peer-listen", address, "--drain", "1")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdserve.kvd", "--state-dir", folder, *flags
        )
        daemon = KvdOperator(f"{folder}/kvd.sock", address)
        try:
            await daemon.ready()
            yield daemon
        finally:
            await daemon.aclose()
            process.terminate()
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def nodes() -> AsyncIterator[tuple[KvdOperator, KvdOperator]]:
    """Two daemons."""
    async with node() as a, node() as b:
        yield a, b


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def over_nixl(nodes: tuple[KvdOperator, KvdOperator], llama: Path) -> AsyncIterator[Pair]:
    """Two ranks with blocks of 64 tokens beside one daemon, one rank with blocks of 32 and a larger pool beside
    another."""
    prefill, decode = small(llama, 64, NO_CACHE, ranks=2), small(llama, 32, NO_CACHE, core=1, megabytes=5)
    async with open_pair(nodes[0], prefill, decode, nodes[1]) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def latents_over_nixl(nodes: tuple[KvdOperator, KvdOperator], mla: Path) -> AsyncIterator[Pair]:
    """MLA: two ranks that hold the same latent beside one daemon, one with a larger pool beside another."""
    async with open_pair(nodes[0], latent(mla, ranks=2), latent(mla, core=1, megabytes=7), nodes[1]) as pair:
        yield pair


@MODES
@BACK
@pytest.mark.parametrize("length", [1, 150])
async def test_between_two_daemons_over_nixl(
    over_nixl: Pair, prompt: Prompts, back: bool, mode: Mode, length: int
) -> None:
    """Heads and blocks are taken apart by the daemon that fetches, from what the other's ranks registered."""
    await same_over_nixl(over_nixl.back() if back else over_nixl, mode, prompt(length))


@MODES
@BACK
async def test_mla_between_two_daemons_over_nixl(
    latents_over_nixl: Pair, prompt: Prompts, back: bool, mode: Mode
) -> None:
    """The latent crosses once for each rank that wants it, from one of the ranks that hold it, between pools of unequal
    size."""
    pair = latents_over_nixl.back() if back else latents_over_nixl
    assert pair.prefill.info.num_blocks != pair.decode.info.num_blocks
    both = await same_over_nixl(pair, mode, prompt(100))
    assert both.landed.facts.kv_bytes == pair.decode.info.ranks * 7 * 2 * 16 * 576 * 4


async def same_over_nixl(pair: Pair, mode: Mode, tokens: Prompt) -> Handover:
    """One prompt over both engines, which leaves nothing behind; the answer is decode's own."""
    alone = await ask(pair.decode, tokens, SHORT)
    both = await pair.hand_over(mode, tokens, SHORT)
    assert both.consumed.tokens == alone.tokens
    assert both.consumed.last.recomputed_tokens == 0
    assert both.landed.facts.transport == "nixl"
    await pair.idle()
    return both


async def test_another_head_count_is_refused_with_both_layouts(
    pool: EnginePool, sizes: Pair, tmp_path: Path, prompt: Prompts
) -> None:
    """Heads that no copy can make up: refused by name, before a byte moves."""
    other = tiny_llama(tmp_path, TinyShape(kv_heads=4))
    async with pool.engine(small(other, 32)) as engine:
        tokens, produce = prompt(40), sizes.produce(Mode.READ)
        offered = (await ask(sizes.prefill, tokens, FIRST, produce)).last
        with pytest.raises(IncompatibleEngines) as caught:
            await ask(engine, tokens, SHORT, sizes.consume(produce, offered))
        for said in ("kv_heads: 2 != 4", sizes.prefill.info.layout, engine.info.layout):
            assert said in caught.value.message
    sizes.cancel(produce.transfer_id)
