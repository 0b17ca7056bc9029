"""The pure parts of the vLLM adapter: layouts, identity, options, news, start reports."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.vllm import identity, news
from pdserve.engine.vllm.layout import TensorShape, block_order, layout_of, spans_of
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.engine.vllm.startup import RankFacts, StartReport
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from pdserve.kvd.client import End, Outcome
from pdserve.kvd.types import Span
from pdserve.rpc.errors import ConfigError, KvdUnavailable, PeerLost

CPU_ATTN = TensorShape((85, 2, 32, 64), (4096, 2048, 64, 1), 4, 1_392_640)
FLASH_ATTN = TensorShape((85, 8, 16, 256), (32768, 256, 2048, 1), 2, 0)
K_AND_V_APART = TensorShape((2, 85, 16, 8, 128), (85 * 16384, 16384, 1024, 128, 1), 2, 0)
MLA = TensorShape((56, 1, 16, 576), (9216, 9216, 576, 1), 4, 0)


def test_cpu_attention_has_one_dense_span() -> None:
    """CPU_ATTN: a block is K and V of all heads in one run."""
    assert spans_of(CPU_ATTN, 85) == (Span(1_392_640, 16384, 16384),)


def test_a_permuted_block_is_dense_too() -> None:
    """FlashAttention's tokens-before-heads order inside a block does not matter to a copy."""
    assert spans_of(FLASH_ATTN, 85) == (Span(0, 65536, 65536),)


def test_k_and_v_apart_are_two_spans() -> None:
    """Where K and V lie apart, a block is two runs."""
    assert spans_of(K_AND_V_APART, 85) == (Span(0, 32768, 32768), Span(85 * 32768, 32768, 32768))


def test_mla_has_one_span() -> None:
    """MLA: one latent per token; a dimension of size 1 does not count."""
    assert spans_of(MLA, 56) == (Span(0, 36864, 36864),)


def test_blocks_with_gaps_inside_are_refused() -> None:
    """Bytes between the elements of a block belong to something else."""
    with pytest.raises(ConfigError, match="not dense"):
        spans_of(replace(CPU_ATTN, stride=(8192, 2048, 64, 2)), 85)


@pytest.mark.parametrize("shape", [(85, 85, 32, 64), (84, 2, 32, 64)])
def test_an_unclear_block_dimension_is_refused(shape: tuple[int, ...]) -> None:
    """Two candidates for the block dimension are refused like none: a guess could copy others' KV."""
    with pytest.raises(ConfigError, match="dimension"):
        spans_of(replace(CPU_ATTN, shape=shape), 85)


@given(
    blocks=st.integers(3, 7),
    outer=st.integers(1, 2),
    inner=st.permutations([0, 1, 2]),
    gap=st.integers(0, 5),
)
def test_spans_cover_a_block_and_nothing_else(blocks: int, outer: int, inner: list[int], gap: int) -> None:
    """Whatever the order of dimensions: the bytes that the spans name for a block are exactly those
    of its elements."""
    sizes = (2, 8, 9)
    base = numpy.zeros((outer, blocks, *(sizes[i] for i in inner), 1), numpy.int16)
    dense = int(numpy.prod(sizes))
    strides = list(numpy.array(base.strides) // 2)
    strides[1] = dense + gap
    strides[0] = blocks * (dense + gap)
    tensor = TensorShape(base.shape, tuple(int(s) for s in strides), 2, 6)
    block = blocks - 1
    named = {
        byte
        for span in spans_of(tensor, blocks)
        for byte in range(span.offset + block * span.stride, span.offset + block * span.stride + span.length)
    }
    elements = {
        6 + 2 * int(numpy.dot(index, tensor.stride)) + half
        for index in numpy.ndindex(*tensor.shape)
        if index[1] == block
        for half in (0, 1)
    }
    assert named == elements


def test_layers_are_in_the_models_order() -> None:
    """Layer 10 comes behind layer 9, whatever order vLLM names them in."""
    tensors = {
        f"model.layers.{index}.self_attn.attn": replace(CPU_ATTN, offset=index * 85 * 16384) for index in (10, 9, 0)
    }
    layout, names = layout_of(tensors, 85, 32)
    assert [name.split(".")[2] for name in names] == ["0", "9", "10"]
    assert [spans[0].offset // (85 * 16384) for spans in layout.layers] == [0, 9, 10]
    assert (layout.block_size, layout.num_blocks) == (32, 85)


def test_a_model_without_kv_is_refused() -> None:
    """There must be something to hand over."""
    with pytest.raises(ConfigError, match="no KV cache"):
        layout_of({}, 85, 32)


def test_block_order_tells_layouts_apart() -> None:
    """Engines whose blocks have equal bytes in another order do not pair, whatever their sizes."""
    heads_first = TensorShape((85, 8, 16, 256), (32768, 4096, 256, 1), 2, 0)
    assert block_order(FLASH_ATTN, 85) != block_order(heads_first, 85)
    more_blocks = TensorShape((99, 8, 16, 256), (32768, 256, 2048, 1), 2, 4096)
    assert block_order(FLASH_ATTN, 85) == block_order(more_blocks, 99)


def test_weights_of_one_shape_and_other_values_differ(tmp_path: Path) -> None:
    """A fine-tune has the sizes of its base model: the digest must see its values."""
    one, same, other = (
        identity.folder_digest(tiny_llama(tmp_path / str(index), TinyShape(seed=seed)))
        for index, seed in enumerate((0, 0, 1))
    )
    assert one == same
    assert one != other


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Nothing to compare is not equal."""
    with pytest.raises(ConfigError, match="no weights"):
        identity.folder_digest(tmp_path)


def test_where_a_model_was_found_does_not_matter() -> None:
    """The configuration's digest leaves out paths and library versions only."""
    config = {"hidden_size": 64, "_name_or_path": "/a", "transformers_version": "5"}
    assert identity.config_digest(config) == identity.config_digest({"hidden_size": 64, "_name_or_path": "/b"})
    assert identity.config_digest(config) != identity.config_digest({**config, "hidden_size": 65})


def test_options_refuse_what_they_do_not_know() -> None:
    """A connector that someone else configures says so at start."""
    options = ConnectorOptions("e", "/kvd.sock", 1, {"model": "m"}, "/tmp/r")
    assert ConnectorOptions.decode(json.loads(json.dumps(options.encode()))) == options
    with pytest.raises(ConfigError, match="proxy_ip"):
        ConnectorOptions.decode({**options.encode(), "proxy_ip": ""})


def test_news_come_back_as_they_were() -> None:
    """What the scheduler says of consumers survives vLLM's statistics."""
    end = End("h", b"t" * 16, Outcome.FAILED, "PEER_LOST", "rank 0 died", consumer=2)
    sent: list[news.News] = [news.Taken(b"t" * 16, 2, 64), news.failure(end)]
    assert news.decode(news.encode(sent)) == sent
    assert news.decode(None) == []


def test_a_start_report_carries_facts_and_the_first_error(tmp_path: Path) -> None:
    """The service learns what its engine's processes know, and why one died, as the same class."""
    report = StartReport(str(tmp_path))
    for rank in (1, 0):
        report.facts(RankFacts(rank, 85, 32, {"model": "m"}))
    assert [facts.rank for facts in report.read()] == [0, 1]
    assert report.error() is None
    with pytest.raises(KvdUnavailable), report.errors("worker"):
        raise KvdUnavailable("no kvd")
    said = report.error()
    assert isinstance(said, KvdUnavailable)
    assert said.message == "no kvd"


def test_an_error_that_is_not_ours_is_reported_by_name(tmp_path: Path) -> None:
    """A defect in the connector reaches the operator too."""
    report = StartReport(str(tmp_path))
    with pytest.raises(ZeroDivisionError), report.errors("scheduler"):
        _ = 1 / 0
    said = report.error()
    assert said is not None
    assert "ZeroDivisionError" in said.message
    assert not isinstance(said, PeerLost)
