"""The pure parts of the simulated engine: content, blocks, answers, configuration."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.port import Finish, Sampling
from pdserve.engine.sim import content
from pdserve.engine.sim.answer import Answer
from pdserve.engine.sim.blocks import BlockPool
from pdserve.engine.sim.config import EOS, KvOrder, SimConfig
from pdserve.engine.sim.layout import layout_of
from pdserve.engine.sim.memory import SimMemory
from pdserve.rpc.errors import ConfigError, PdserveError

tokens = st.lists(st.integers(0, 257), min_size=1, max_size=80)


# -- content --------------------------------------------------------------------------------


@given(tokens=tokens)
def test_prefixes_at_once_are_prefixes_one_by_one(tokens: list[int]) -> None:
    """The cumulative sum and the recurrence agree."""
    raw, expected = 0, []
    for token in tokens:
        raw = content.extend(raw, token)
        expected.append(raw)
    assert content.prefixes(tokens).tolist() == expected


@given(one=tokens, other=tokens)
def test_other_prefixes_have_other_words(one: list[int], other: list[int]) -> None:
    """Two different prefixes never share their word, KV or position in the cache."""
    same = one == other
    assert (content.prefixes(one)[-1] == content.prefixes(other)[-1]) is np.bool_(same)


def test_kv_differs_by_layer_rank_word_and_prefix() -> None:
    """A block of another layer, rank or prompt is told apart everywhere."""
    raws = content.prefixes(range(64))
    blocks = [content.kv(raws, layer, rank, 3) for layer in range(3) for rank in range(2)]
    assert blocks[0].shape == (64, 3)
    words = np.concatenate([b.ravel() for b in blocks])
    assert len(np.unique(words)) == len(words)


def test_next_tokens_are_printable_and_follow_the_seed() -> None:
    """Sampled tokens are printable ASCII; a seed changes the text, seed 0 is greedy."""
    raws = content.prefixes(range(200)).tolist()
    greedy = [content.next_token(raw, 0) for raw in raws]
    assert all(32 <= token < 127 for token in greedy)
    assert greedy != [content.next_token(raw, 1) for raw in raws]
    assert len(set(greedy)) > 50


# -- memory ---------------------------------------------------------------------------------


def test_memory_tells_where_it_is_wrong() -> None:
    """What was filled is right; one changed word is found with layer, token and block."""
    config = SimConfig(layers=2, num_blocks=4, block_size=4, block_bytes=64)
    memory = SimMemory(config, 1)
    raws = content.prefixes(range(10))
    positions = np.arange(10)
    blocks = np.asarray([3, 0, 2])
    for layer in range(2):
        memory.fill(layer, blocks[positions // 4], positions % 4, raws)
    assert memory.wrong([3, 0, 2], raws) == ""
    assert memory.wrong([3, 0, 2], raws[:7]) == ""
    memory.words[1, 0, 1, 1] ^= 1
    assert "rank 1 layer 1 token 5 (block 0), 1 of 10" in memory.wrong([3, 0, 2], raws)
    memory.poison([3])
    assert "layer 0 token 0 (block 3)" in memory.wrong([3], raws[:4])
    layout_of(config, 0).check(memory.size)
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.words.shape  # noqa: B018 - the property raises


# -- blocks ---------------------------------------------------------------------------------


def test_cached_blocks_are_found_until_the_pool_needs_them() -> None:
    """A released block keeps its content until it is the one unused for longest."""
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.cache(a, 11)
    pool.cache(b, 22)
    pool.release([a, b])
    assert pool.find([11, 22, 33]) == [a, b]
    assert pool.unreferenced([a, b]) == 2
    pool.reference([a])
    assert pool.free == 2
    pool.allocate(2)
    assert pool.find([11, 22]) == [a]
    with pytest.raises(PdserveError, match="1 blocks asked for, 0"):
        pool.allocate(1)


def test_the_tail_of_a_prompt_is_evicted_first() -> None:
    """A shared prefix outlives its endings."""
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, 1)
    pool.cache(second, 2)
    pool.release([first, second])
    assert pool.allocate(1) == [second]
    assert pool.find([1, 2]) == [first]


def test_releasing_twice_is_a_defect() -> None:
    """A block that is free cannot be released."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(PdserveError, match="twice"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, sharing, caching and release: the books always balance."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(1, 4), key=st.integers(0, 5))
    def allocate(self, count: int, key: int) -> None:
        if count <= self.pool.free:
            self.owners.append(self.pool.allocate(count))
            self.pool.cache(self.owners[-1][0], key)

    @rule(keys=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def share(self, keys: list[int]) -> None:
        found = self.pool.find(keys)
        if found:
            self.pool.reference(found)
            self.owners.append(found)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(index))

    @invariant()
    def balanced(self) -> None:
        self.pool.check(self.owners)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, deadline=None)


def test_the_check_can_fail() -> None:
    """An owner too many, and a reference without owner, are found."""
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(PdserveError, match="owners"):
        pool.check([blocks, blocks])
    with pytest.raises(PdserveError, match="references"):
        pool.check([])


# -- answers --------------------------------------------------------------------------------


def run(answer: Answer, start: int = 1) -> tuple[str, list[int], str, Finish]:
    """Text, tokens, stop reason and finish of a whole answer."""
    raw, text, ids = start, "", []
    while True:
        piece = answer.add(raw)
        text += piece.text
        ids.append(piece.token_id)
        if piece.finish is not None:
            return text, ids, piece.stop_reason, piece.finish
        raw = content.extend(raw, piece.token_id)


def plain(count: int = 60) -> str:
    return run(Answer(Sampling(temperature=0), count, 0))[0]


def test_length_and_seed() -> None:
    """An answer ends at its most tokens; a seed changes it only where it is sampled."""
    text, ids, reason, finish = run(Answer(Sampling(temperature=0, seed=5), 10, 0))
    assert (len(ids), finish, reason) == (10, Finish.LENGTH, "")
    assert text == plain(10) == "".join(map(chr, ids))
    assert run(Answer(Sampling(temperature=0.5, seed=5), 10, 0))[0] != text


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_stop_string_is_not_part_of_the_text(length: int) -> None:
    """Text up to the stop string, nothing of it, even where it came in pieces; its name is the reason."""
    whole = plain()
    stop = whole[20 : 20 + length]
    text, ids, reason, finish = run(Answer(Sampling(temperature=0, stop=("no such", stop)), 60, 0))
    assert (text, reason, finish) == (whole[: whole.index(stop)], stop, Finish.STOP)
    assert len(ids) == whole.index(stop) + length


def test_held_back_text_comes_out_at_the_end() -> None:
    """Where a stop string never comes, every character still does."""
    assert run(Answer(Sampling(temperature=0, stop=("x" * 30,)), 60, 0))[0] == plain()


@given(
    stops=st.lists(st.integers(0, 50).flatmap(lambda a: st.tuples(st.just(a), st.integers(1, 4))), max_size=3),
    least=st.integers(0, 30),
)
def test_stop_strings_and_min_tokens(stops: list[tuple[int, int]], least: int) -> None:
    """Against a slow reading of the whole text: the first stop string whose last character comes with
    the fewest tokens or later ends the answer, and the text is what is before it."""
    whole = plain()
    names = tuple(whole[a : a + n] for a, n in stops)
    text, ids, _, _ = run(Answer(Sampling(temperature=0, stop=names, min_tokens=least), 60, 0))
    for end in range(1, 61):
        if end < least:
            continue
        found = [(whole[:end].find(n, max(0, end - len(n))), n) for n in names]
        found = [(at, n) for at, n in found if at >= 0]
        if found:
            assert (text, len(ids)) == (whole[: min(found)[0]], end)
            return
    assert text == whole


@given(
    cut=st.integers(1, 40),
    stops=st.lists(st.integers(0, 50).flatmap(lambda a: st.tuples(st.just(a), st.integers(1, 4))), max_size=3),
    least=st.integers(0, 30),
)
def test_an_answer_goes_on_from_a_prompt_that_has_its_beginning(
    cut: int, stops: list[tuple[int, int]], least: int
) -> None:
    """As a greedy model's does: the prompt and the first tokens, as a prompt, are answered with the rest."""
    whole = plain()
    names = tuple(name for a, n in stops if whole.index(name := whole[a : a + n]) >= cut)
    said = Sampling(temperature=0, stop=names, min_tokens=least)
    text, ids, reason, finish = run(Answer(said, 60, 20))
    if len(ids) <= cut:
        return
    raw = 1
    for token in ids[:cut]:
        raw = content.extend(raw, token)
    rest = run(Answer(replace(said, min_tokens=max(0, least - cut)), 60 - cut, 20), raw)
    assert rest == (text[cut:], ids[cut:], reason, finish)


def test_stop_tokens_and_min_tokens() -> None:
    """A stop token ends the answer without text, but not before min_tokens."""
    whole = plain()
    token = ord(whole[5])
    text, ids, reason, finish = run(Answer(Sampling(temperature=0, stop_token_ids=(token,)), 60, 0))
    first = whole.index(whole[5])
    assert (text, reason, finish) == (whole[:first], str(token), Finish.STOP)
    assert ids[-1] == token
    later, *_ = run(Answer(Sampling(temperature=0, stop_token_ids=(token,), min_tokens=first + 2), 60, 0))
    assert len(later) > first


def test_the_models_own_end() -> None:
    """One position in so many ends the answer with the end-of-sequence token, unless ignored."""
    answers = [run(Answer(Sampling(temperature=0), 500, 8), start) for start in range(1, 60)]
    assert all(ids[-1] == EOS and finish is Finish.STOP and reason == "" for _, ids, reason, finish in answers)
    assert 3 < sum(len(ids) for _, ids, _, _ in answers) / len(answers) < 16
    _, ids, _, finish = run(Answer(Sampling(temperature=0, ignore_eos=True), 100, 8))
    assert (len(ids), finish) == (100, Finish.LENGTH)


def test_logprobs_are_consistent() -> None:
    """As many as asked, best first, the sampled one first, together at most 1."""
    answer = Answer(Sampling(temperature=0, logprobs=5), 3, 0)
    piece = answer.add(random.Random(7).getrandbits(64))
    (position,) = piece.logprobs
    assert position.sampled.token_id == piece.token_id
    assert position.top[0] == position.sampled
    assert len({c.token_id for c in position.top}) == 5
    values = [c.logprob for c in position.top]
    assert values == sorted(values, reverse=True)
    assert sum(np.exp(values)) < 1
    (bare,) = Answer(Sampling(temperature=0, logprobs=0), 3, 0).add(1).logprobs
    assert bare.top == ()


# -- configuration --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"layers": 0},
        {"block_bytes": 100},
        {"max_model_len": 1},
        {"eos_every": -1},
        {"fence_timeout": 0.0},
        {"ranks": -2},
    ],
)
def test_impossible_shapes_are_refused(values: dict[str, int]) -> None:
    """A shape that cannot work is a ConfigError at the start."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        SimConfig(**values)  # type: ignore[arg-type]  # ints by name


def test_unknown_settings_are_refused() -> None:
    """`with_` knows its fields."""
    assert SimConfig().with_(layers=7).layers == 7
    with pytest.raises(ConfigError, match="layerz"):
        SimConfig().with_(layerz=7)


def test_what_must_be_shared_is_in_the_identity() -> None:
    """Engines of another model, depth, head count or size of a head differ; of another pool, block size, rank count
    or order they do not."""
    base = SimConfig(kv_heads=2, block_bytes=512).identity()
    changes: list[dict[str, int | str]] = [{"model": "x"}, {"layers": 9}, {"block_bytes": 1024}, {"kv_heads": 4}]
    for change in changes:
        assert SimConfig(kv_heads=2, block_bytes=512).with_(**change).identity() != base
    assert SimConfig(kv_heads=2, block_bytes=512, num_blocks=9, max_model_len=99).identity() == base
    assert SimConfig(kv_heads=2, block_bytes=1024, block_size=32, kv_order=KvOrder.APART).identity() == base
    assert SimConfig(kv_heads=2, block_bytes=256, ranks=2, kv_order=KvOrder.HEADS).identity() == base
