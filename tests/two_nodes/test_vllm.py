"""Prefill with vLLM on one node, decode with vLLM on another, started with two commands: real KV over the daemons'
link, by nixl over TCP between daemons that show each other certificates. The clocks of the second node are 3 s ahead.

Two prefill engines take turns: KV of the one lies as decode's does, the other has two ranks and blocks half as large.
"""

import pytest

from tests.two_nodes.beside import HALF
from tests.two_nodes.conftest import PEER, A, B
from tests.two_nodes.links import connections, received
from tests.two_nodes.ups import AHEAD, BLOCK, TOKEN_BYTES, Ups, drawn

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),  # the first test starts the engines
]


@pytest.fixture
def ups(vllm_ups: Ups) -> Ups:
    """Both prefill engines."""
    return vllm_ups


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_tokens_are_those_of_one_engine(ups: Ups, mode: str) -> None:
    """Prompts of a token, of a block and a token of either size, and of many chunks, through each of the two prefill
    engines, one laid out as decode is and one of two ranks with blocks half as large: the KV crosses the link, all of
    it, and decode goes on as if it had computed it."""
    prompts = drawn(1, 33, 65, 300, name=mode)
    alone = await ups.alone(prompts)
    before, moved = received(), 0
    for prompt, tokens in zip(prompts, alone, strict=True):
        got = await ups.answers([prompt] * 2, mode=mode)  # of two at once each has an engine of its own
        moved += ups.checked(got, [tokens] * 2)
        assert {ups.blocks[answer["prefill"]] for answer in got} == {BLOCK, HALF}
        assert {answer["mode"] for answer in got} == {mode}
    assert received() - before > moved
    await ups.idle()
    assert len([ends for ends in connections() if any(end.endswith(f":{PEER}") for end in ends)]) == 1


async def test_both_nodes_know_how_far_their_clocks_are_apart(ups: Ups) -> None:
    """Those of the second node really are ahead, with all that the other tests see answered."""
    ahead = [(await ups.describe(node)).peers[0].clock_ahead_seconds for node in (A, B)]
    assert ahead == pytest.approx([AHEAD, -AHEAD], abs=0.2)


@pytest.mark.parametrize("damaged", [BLOCK, HALF], ids=["as decode's", "of two ranks"])
async def test_decode_computes_on_what_prefill_holds(ups: Ups, damaged: int) -> None:
    """The negative control: one block of one prefill engine, of two ranks that of one head, is overwritten between the
    offer and the copy; the answer through this engine is another one, and that through the other engine is right. With
    decode's kvd stopped there is time for that."""
    prompts = drawn(300, name="control") * 2
    alone = await ups.alone(prompts)
    with ups.stopped(B, "kvd"):
        asking = await ups.asking(prompts, mode="read")
        blocks = await ups.offered(2)
        await ups.damage(damaged, blocks[ups.engine(damaged)][1:2])
    answers = {ups.blocks[answer["prefill"]]: answer for answer in await asking}
    wrong, right = answers[damaged], answers[BLOCK + HALF - damaged]
    assert wrong["kv_bytes"] == 5 * BLOCK * TOKEN_BYTES
    assert wrong["tokens"] != alone[0]
    ups.checked([right], alone[:1])
    ups.checked(await ups.answers(prompts, mode="read"), alone)
