"""Hand-over of models whose KV lies differently: two ranks, and MLA."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.port import Sampling
from pdserve.engine.vllm.testing_pair import FIRST, Pair, Prompt, ask
from pdserve.engine.vllm.testing_pool import EnginePool
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


@pytest_asyncio.fixture(loop_scope="session")
async def latents(pool: EnginePool, mla: Path) -> AsyncIterator[Pair]:
    """Two engines of a DeepSeek-V2 shape."""
    async with pool.pair(latent(mla), latent(mla, core=1)) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("mode", Mode)
async def test_mla(mode: Mode, length: int, latents: Pair, prompt: Prompts) -> None:
    """MLA's latent of 576 values a token, in blocks of 16: tokens as from one engine."""
    tokens = prompt(length)
    alone = await ask(latents.prefill, tokens, SHORT)
    both = await latents.hand_over(mode, tokens, SHORT)
    assert both.consumed.tokens == alone.tokens
    assert both.landed.facts.kv_bytes == -(-length // 16) * 2 * 16 * 576 * 4


@pytest_asyncio.fixture(loop_scope="session")
async def ranks(pool: EnginePool, llama: Path) -> AsyncIterator[Pair]:
    """Two engines of two ranks each: eight processes on two cores, so few tokens."""
    async with pool.pair(small(llama, 32, NO_CACHE, ranks=2), small(llama, 32, NO_CACHE, core=1, ranks=2)) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 33, 100])
@pytest.mark.parametrize("mode", Mode)
async def test_two_ranks(mode: Mode, length: int, ranks: Pair, prompt: Prompts) -> None:
    """Each rank's half of the heads arrives at the same rank of the other engine; a transfer ends
    once, when all ranks have landed. One token, a block and a token, and more than a chunk."""
    tokens = prompt(length)
    alone = await ask(ranks.prefill, tokens, SHORT)
    both = await ranks.hand_over(mode, tokens, SHORT)
    assert both.consumed.tokens == alone.tokens
    facts = both.landed.facts
    assert (facts.ranks, facts.layers) == (2, 3)
    assert facts.kv_bytes == -(-length // 32) * 3 * 2 * 32 * 64 * 4


async def test_two_ranks_give_up_together(ranks: Pair, prompt: Prompts) -> None:
    """A cancelled transfer is reported by both ranks, once each: vLLM's core would die of less and
    of more."""
    produce = ranks.produce(Mode.READ)
    await ask(ranks.prefill, prompt(40), FIRST, produce)
    ranks.cancel(produce.transfer_id)
    await ranks.idle()


async def test_other_weights_do_not_pair(pool: EnginePool, pair: Pair, tmp_path: Path, prompt: Prompts) -> None:
    """An engine of the same shape with other weights is refused by name before anything moves."""
    other = tiny_llama(tmp_path, TinyShape(seed=1))
    async with pool.engine(usual(other, 1)) as engine:
        tokens, produce = prompt(40), pair.produce(Mode.READ)
        offered = (await ask(pair.prefill, tokens, FIRST, produce)).last
        with pytest.raises(IncompatibleEngines, match="weights"):
            await ask(engine, tokens, SHORT, pair.consume(produce, offered))
    pair.cancel(produce.transfer_id)
