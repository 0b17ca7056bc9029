"""vLLM engines on a kvd that fails: its mover lies or breaks, or it dies and comes back.

Real: engines, daemon code, sockets. Fake: the link (the simulated one, with faults by hand); the
daemon runs in this process so that the faults can be reached.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import FIRST, GREEDY, KvdOperator, Pair, Prompt, ask, until
from pdserve.engine.vllm.testing_pool import EngineKind, open_pair
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.server import serving
from pdserve.kvd.transport.sim import Fault, FaultPlan, SimTransport
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import KvdUnavailable, TransferFailed
from tests.e2e.vllm.kinds import CONTEXT, NO_CACHE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test starts the engines
]

Prompts = Callable[[int], Prompt]


class Faulty:
    """A daemon in this process that can be stopped and started, and the pair on it."""

    def __init__(self, folder: Path) -> None:
        self.faults = FaultPlan()
        self.opened: Pair | None = None
        self._config = KvdConfig(folder)
        self._running = contextlib.AsyncExitStack()

    @property
    def pair(self) -> Pair:
        """The two engines."""
        assert self.opened is not None
        return self.opened

    async def start(self) -> None:
        """A daemon with a new epoch, at the same sockets."""
        faults = self.faults
        daemon = serving(self._config, transports=lambda config, arena: (SimTransport(arena, 10e9, 0.0, faults),))
        await self._running.enter_async_context(daemon)

    async def stop(self) -> None:
        """The daemon ends."""
        await self._running.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def faulty(state_dir: Path, llama: Path) -> AsyncIterator[Faulty]:
    """See Faulty."""
    folder = state_dir / "f"
    faulty = Faulty(folder)
    await faulty.start()
    kvd = KvdOperator(str(folder / "kvd.sock"))
    prefill, decode = (EngineKind(llama, (*CONTEXT, NO_CACHE), core) for core in (0, 1))
    try:
        async with open_pair(kvd, prefill, decode) as pair:
            faulty.opened = pair
            yield faulty
    finally:
        await kvd.aclose()
        await faulty.stop()


@pytest.mark.parametrize("fault", [None, Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_a_mover_that_lies_is_seen_in_the_tokens(
    fault: Fault | None, faulty: Faulty, solo: EngineProcess, prompt: Prompts
) -> None:
    """The negative control of every identity test here: the same comparison turns red when kvd
    moves nothing, or the wrong blocks, and says that it landed."""
    tokens = prompt(120)
    faulty.faults.script = [fault] * 8
    both = await faulty.pair.hand_over(Mode.READ, tokens)
    faulty.faults.script = []
    same = both.consumed.tokens == (await ask(solo, tokens)).tokens
    assert same is (fault is None)
    await faulty.pair.idle()


@pytest.mark.parametrize("recompute", [False, True])
async def test_a_mover_that_breaks_is_a_typed_error(
    recompute: bool, faulty: Faulty, solo: EngineProcess, prompt: Prompts
) -> None:
    """Half of the bytes are there, half are not: the request fails, or is computed from nothing."""
    tokens, produce = prompt(120), faulty.pair.produce(Mode.READ)
    offered = (await ask(faulty.pair.prefill, tokens, FIRST, produce)).last
    consume = faulty.pair.consume(produce, offered, recompute=recompute)
    faulty.faults.script = [Fault.FAIL] * 8
    asking = ask(faulty.pair.decode, tokens, GREEDY, consume)
    if recompute:
        answer = await asking
        assert answer.tokens == (await ask(solo, tokens)).tokens
        assert answer.last.recomputed_tokens == 120
    else:
        with pytest.raises(TransferFailed):
            await asking
    faulty.faults.script = []
    faulty.pair.cancel(produce.transfer_id)
    await faulty.pair.idle()


async def test_kvds_death_costs_what_is_in_flight_and_no_more(
    faulty: Faulty, solo: EngineProcess, prompt: Prompts
) -> None:
    """A consumer that waits is told KVD_UNAVAILABLE, a held prompt is let go, both engines serve
    alone meanwhile, and with the next daemon they hand over again."""
    pair, tokens = faulty.pair, prompt(120)
    held = pair.produce(Mode.READ)
    await ask(pair.prefill, tokens, FIRST, held)
    waiting = pair.produce(Mode.WRITE)
    consuming = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(waiting)))
    await pair.reserved(waiting.transfer_id)
    await faulty.stop()
    alone = (await ask(solo, tokens)).tokens
    assert (await ask(pair.decode, tokens)).tokens == alone
    with pytest.raises(KvdUnavailable):
        await consuming
    await faulty.start()
    await pair.kvd.ready()
    await until(lambda: again(pair, tokens, alone), "no hand-over after kvd came back")
    await pair.idle()


async def again(pair: Pair, tokens: Prompt, alone: list[int]) -> bool:
    """Hands over once; each process of the engines comes back to kvd by itself, so this may be too early."""
    hosts = [pair.host(engine).attachment.attached for engine in (pair.prefill, pair.decode)]
    if not all(hosts) or await pair.kvd.regions() < 2:
        return False
    try:
        both = await pair.hand_over(Mode.WRITE, tokens)
    except (TransferFailed, KvdUnavailable):
        return False
    assert both.consumed.tokens == alone
    return True
