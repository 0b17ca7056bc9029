"""Hand-over of models whose KV lies differently: two ranks, and MLA."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.port import Sampling
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import FIRST, KvdOperator, Pair, Prompt, ask, open_pair
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama, tiny_mla
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import IncompatibleEngines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test of each shape starts its engines
]

SHORT = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
Prompts = Callable[[int], Prompt]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mla(kvd: KvdOperator, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two engines of a DeepSeek-V2 shape; vLLM has neither chunks nor a prefix cache for it on CPU."""
    model = tiny_mla(tmp_path_factory.mktemp("mla"))
    async with open_pair(kvd, model, "--max-model-len", "256", "--kv-cache-memory-bytes", str(4 << 20)) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("mode", Mode)
async def test_mla(mode: Mode, length: int, mla: Pair, prompt: Prompts) -> None:
    """MLA's latent of 576 values a token, in blocks of 16: tokens as from one engine."""
    tokens = prompt(length)
    alone = await ask(mla.prefill, tokens, SHORT)
    both = await mla.hand_over(mode, tokens, SHORT)
    assert both.consumed.tokens == alone.tokens
    assert both.landed.facts.kv_bytes == -(-length // 16) * 2 * 16 * 576 * 4
    await mla.idle()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks(kvd: KvdOperator, llama: Path) -> AsyncIterator[Pair]:
    """Two engines of two ranks each: six processes on two cores, so few tokens."""
    args = ("--tensor-parallel-size", "2", "--max-model-len", "256", "--block-size", "32")
    more = ("--kv-cache-memory-bytes", str(2 << 20), "--max-num-batched-tokens", "64", "--max-num-seqs", "4")
    async with open_pair(kvd, llama, *args, *more, "--no-enable-prefix-caching", ranks=2) as pair:
        yield pair


@pytest.mark.parametrize("mode", Mode)
async def test_two_ranks(mode: Mode, ranks: Pair, prompt: Prompts) -> None:
    """Each rank's half of the heads arrives at the same rank of the other engine; a transfer ends
    once, when all ranks have landed."""
    tokens = prompt(100)
    alone = await ask(ranks.prefill, tokens, SHORT)
    both = await ranks.hand_over(mode, tokens, SHORT)
    assert both.consumed.tokens == alone.tokens
    facts = both.landed.facts
    assert (facts.ranks, facts.layers) == (2, 3)
    assert facts.kv_bytes == 4 * 3 * 2 * 32 * 64 * 4
    await ranks.idle()


async def test_two_ranks_give_up_together(ranks: Pair, prompt: Prompts) -> None:
    """A cancelled transfer is reported by both ranks, once each: vLLM's core would die of less and
    of more."""
    produce = ranks.produce(Mode.READ)
    await ask(ranks.prefill, prompt(40), FIRST, produce)
    ranks.cancel(produce.transfer_id)
    await ranks.idle()


async def test_other_weights_do_not_pair(kvd: KvdOperator, pair: Pair, tmp_path: Path, prompt: Prompts) -> None:
    """An engine of the same shape with other weights is refused by name before anything moves."""
    other = tiny_llama(tmp_path, TinyShape(seed=1))
    args = ("--max-model-len", "512", "--block-size", "32", "--kv-cache-memory-bytes", str(4 << 20))
    engine = await EngineProcess.start(VllmSettings(str(other), kvd.socket, args=args))
    try:
        tokens, produce = prompt(40), pair.produce(Mode.READ)
        offered = (await ask(pair.prefill, tokens, FIRST, produce)).last
        with pytest.raises(IncompatibleEngines, match="weights"):
            await ask(engine, tokens, SHORT, pair.consume(produce, offered))
    finally:
        await engine.aclose()
    pair.cancel(produce.transfer_id)
