"""Real vLLM engines on CPU and a real kvd, shared by all tests of this folder.

Real: vLLM with tiny random models, kvd as a process, memory, sockets. Stands in for the services:
`pdserve.engine.vllm.testing_pair`. Engines run in processes of their own, because vLLM forks and
this one uses gRPC; most come out of one pool, which starts each kind once.
"""

import asyncio
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import WAIT_S, KvdOperator, Pair, Prompt
from pdserve.engine.vllm.testing_pool import EnginePool
from pdserve.engine.vllm.tiny import tiny_llama, tiny_mla
from tests.e2e.vllm import kinds

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))


@pytest.fixture(scope="session")
def seed() -> int:
    """Prompts follow from it."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    return SEED


@pytest.fixture
def prompt(seed: int, request: pytest.FixtureRequest) -> Callable[..., Prompt]:
    """`prompt(n)`: n tokens that no other test has, so that no prefix cache knows them."""
    source = random.Random(f"{seed} {request.node.nodeid}")
    return lambda n: tuple(source.randrange(256) for _ in range(n))


@pytest.fixture(scope="session")
def state_dir() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="pdsv"))
    yield folder
    shutil.rmtree(folder)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kvd(state_dir: Path) -> AsyncIterator[KvdOperator]:
    """The daemon, as a process; its log goes to this process's stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.kvd", "--state-dir", str(state_dir), "--drain", "1", "--park", "5"
    )
    daemon = KvdOperator(str(state_dir / "kvd.sock"))
    try:
        await daemon.ready()
        yield daemon
    finally:
        await daemon.aclose()
        process.terminate()
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a latent instead of heads."""
    return tiny_mla(tmp_path_factory.mktemp("mla"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(kvd: KvdOperator) -> AsyncIterator[EnginePool]:
    """All engines that a test leaves as it found them."""
    pool = EnginePool(kvd)
    yield pool
    await pool.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def solo(pool: EnginePool, llama: Path) -> AsyncIterator[EngineProcess]:
    """One engine that does everything itself: the reference."""
    async with pool.engine(kinds.alone(llama)) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def pair(pool: EnginePool, llama: Path) -> AsyncIterator[Pair]:
    """Prefill in chunks of 64 tokens, and decode; both with prefix caches."""
    async with pool.pair(kinds.usual(llama, 0), kinds.usual(llama, 1)) as pair:
        yield pair
