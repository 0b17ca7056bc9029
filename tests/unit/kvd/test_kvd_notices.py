"""The form of notices, and what is learnt from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvd.notices import MAX_FRAME_BYTES, Chunk, LayerReady, Notice, StepBegin, StepEnd, decode, encode
from pdserve.kvd.progress import Progress

small = st.integers(0, 2**31)
chunks = st.builds(Chunk, st.text(max_size=8), small, small, st.lists(small, max_size=5).map(tuple), small)


@given(
    st.one_of(
        st.builds(StepBegin, st.text(), small, small, st.lists(chunks, max_size=3).map(tuple)),
        st.builds(LayerReady, st.text(), small, small, small),
        st.builds(StepEnd, st.text(), small, small),
    )
)
def test_a_notice_comes_back_as_it_was(notice: Notice) -> None:
    """decode(encode(x)) is x, of the same kind."""
    assert decode(encode(notice)) == notice


@pytest.mark.parametrize("frame", [b"", b"\x00", b"junk", b"\x93\xa5begin\x01\x02", bytes(MAX_FRAME_BYTES + 1)])
def test_what_is_no_notice_is_refused(frame: bytes) -> None:
    """Garbage, a cut frame and an oversized one raise ValueError and nothing else."""
    with pytest.raises(ValueError, match=r".*"):
        decode(frame)


def chunk(attempt: int, first: int, ids: tuple[int, ...], ready: int) -> Chunk:
    """A chunk of handle h."""
    return Chunk("h", attempt, first, ids, ready)


def test_blocks_are_learnt_in_order_and_repeats_teach_nothing() -> None:
    """Each rank sends the same chunks: the second time there is nothing new."""
    progress = Progress()
    assert progress.add(chunk(0, 0, (7, 8), 2)) == [7, 8]
    assert progress.add(chunk(0, 0, (7, 8), 2)) == []
    assert progress.add(chunk(0, 1, (8, 9), 3)) == [9]
    assert progress.block_ids == [7, 8, 9]


@pytest.mark.parametrize("bad", [chunk(1, 0, (1,), 1), chunk(0, 3, (1,), 4), chunk(0, 0, (1, 2), 2)])
def test_stale_gapped_and_contradicting_chunks_teach_nothing(bad: Chunk) -> None:
    """Another attempt, a gap after a lost notice, other ids than before: ignored."""
    progress = Progress()
    progress.add(chunk(0, 0, (7, 8), 2))
    assert progress.add(bad) == []
    assert progress.block_ids == [7, 8]


def test_readiness_never_passes_what_is_known_and_never_falls() -> None:
    """A layer is ready up to the known blocks, per rank and layer; the offer makes all ready."""
    progress = Progress()
    progress.add(chunk(0, 0, (7, 8), 9))
    assert progress.layer_ready(0, 1, chunk(0, 0, (7, 8), 9))
    assert not progress.layer_ready(0, 1, chunk(0, 0, (7, 8), 1))
    assert [progress.ready(0, 1), progress.ready(0, 0), progress.ready(1, 1)] == [2, 0, 0]
    assert not progress.finish([7, 9])
    assert progress.finish([7, 8, 9])
    assert progress.ready(5, 5) == 3


def test_the_next_attempt_starts_from_nothing() -> None:
    """After a reset neither blocks nor readiness are left, and old chunks are stale."""
    progress = Progress()
    old = chunk(0, 0, (7, 8), 2)
    progress.add(old)
    progress.layer_ready(0, 0, old)
    progress.reset(1)
    assert progress.ready(0, 0) == 0
    assert not progress.layer_ready(0, 0, old)
    assert progress.add(chunk(1, 0, (3,), 1)) == [3]
