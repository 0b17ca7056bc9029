"""TTFT's parts: disjoint, complete, and silent about what no stamp explains."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.proxy.parts import SAME_CLOCK, Point, chain, shifted, skew, split
from pdserve.proxy.types import Mode, Stamps

MS = 1_000_000
DOCS = Path(__file__).parents[3] / "docs/sdk.md"


def read_points() -> dict[int, int]:
    """A READ in which every part takes as many milliseconds as its place in the chain."""
    points: dict[int, int] = {Point.RECEIVED: 0}
    at = 0
    for place, (point, _) in enumerate(chain(handed_over=True, retried=False), 1):
        at += place * MS
        points[point] = at
    return points


def test_the_docs_name_every_part() -> None:
    """The table of docs/sdk.md has each part of each kind of request, and no other."""
    table = DOCS.read_text().partition("| part | until |")[2].partition("\n\n")[0]
    told = re.findall(r"`([a-z_.]+)`", table)
    kinds = itertools.product((True, False), repeat=2)
    assert sorted(told) == sorted({name for a, b in kinds for _, name in chain(handed_over=a, retried=b)})


def test_a_read_splits_into_its_parts() -> None:
    """Each part is the way from one cut point to the next; together they are TTFT."""
    points = read_points()
    timings = split(
        points, chain(handed_over=True, retried=False), points[Point.FIRST_BYTE_WRITTEN] + 5 * MS, Mode.READ
    )
    assert list(timings.parts) == [
        *("tokenize", "admit", "route", "prefill.hop", "prefill.queue", "prefill.forward", "proxy.serialization"),
        *("decode.admit", "kv.wait", "decode.queue", "decode.first_step", "detokenize", "encode", "egress"),
    ]
    assert timings.parts["kv.wait"] == pytest.approx(0.009)
    assert timings.unattributed == 0
    assert sum(timings.parts.values()) == pytest.approx(timings.ttft)
    assert timings.e2e == pytest.approx(timings.ttft + 0.005)


def test_what_write_hides_counts_nothing() -> None:
    """Decode was received and has reserved while prefill computed: no serialization, no wait for blocks."""
    points = read_points()
    points[Point.DECODE_RECEIVED] = points[Point.PREFILL_RECEIVED]
    points[Point.DECODE_BLOCKS_RESERVED] = points[Point.PREFILL_RECEIVED] + MS
    timings = split(points, chain(handed_over=True, retried=False), points[Point.FIRST_BYTE_WRITTEN], Mode.WRITE)
    assert timings.parts["proxy.serialization"] == 0
    assert timings.parts["decode.admit"] == 0
    assert timings.unattributed == 0


def test_a_missing_stamp_is_nobodys_part() -> None:
    """Where kvd's landing was not stamped, neither the wait nor decode's queue can be told."""
    points = read_points()
    del points[Point.KV_LANDED]
    timings = split(points, chain(handed_over=True, retried=False), points[Point.FIRST_BYTE_WRITTEN], Mode.READ)
    assert "kv.wait" not in timings.parts
    assert "decode.queue" not in timings.parts
    assert timings.unattributed == pytest.approx(0.009 + 0.010)


def test_write_without_prefills_word_has_no_wait() -> None:
    """WRITE: decode had its blocks while prefill computed, and prefill has not said until when. Nobody knows where the
    wait for the KV began, so that everything up to its landing is unattributed and decode's parts behind it stand."""
    points = read_points()
    usual = split(points, chain(handed_over=True, retried=False), points[Point.FIRST_BYTE_WRITTEN], Mode.READ).parts
    points[Point.DECODE_RECEIVED] = points[Point.PREFILL_RECEIVED]
    points[Point.DECODE_BLOCKS_RESERVED] = points[Point.PREFILL_RECEIVED] + MS
    for point in (Point.PREFILL_FORWARD_END, Point.PREFILL_SCHEDULED, Point.PREFILL_RECEIVED):
        del points[point]  # its last word is lost, then all of them
        timings = split(points, chain(handed_over=True, retried=False), points[Point.FIRST_BYTE_WRITTEN], Mode.WRITE)
        told = [part for part in usual if part in timings.parts]
        assert timings.parts == {part: usual[part] for part in told}
        assert told[-5:] == ["decode.queue", "decode.first_step", "detokenize", "encode", "egress"]
        assert not {"proxy.serialization", "decode.admit", "kv.wait"} & timings.parts.keys()
        start = max(points[point] for point in (1, 2, 3, 4, 5, 6) if point in points)
        assert timings.unattributed == pytest.approx((points[Point.KV_LANDED] - start) / 1e9)


def test_read_without_prefills_word_has_its_wait() -> None:
    """READ: decode was asked when prefill had ended, so that its wait for the KV is no time of prefill's."""
    points = read_points()
    for point in (Point.PREFILL_RECEIVED, Point.PREFILL_SCHEDULED, Point.PREFILL_FORWARD_END):
        del points[point]
    timings = split(points, chain(handed_over=True, retried=False), points[Point.FIRST_BYTE_WRITTEN], Mode.READ)
    assert timings.parts["decode.admit"] == pytest.approx(0.008)
    assert timings.parts["kv.wait"] == pytest.approx(0.009)


def test_a_retry_is_a_part_of_its_own() -> None:
    """The time that failed attempts took is not laid on the attempt that succeeded."""
    points = read_points()
    points[Point.REDISPATCHED] = points[Point.ROUTED] + 2 * MS
    timings = split(points, chain(handed_over=True, retried=True), points[Point.FIRST_BYTE_WRITTEN], Mode.READ)
    assert timings.parts["retry"] == pytest.approx(0.002)
    assert timings.parts["prefill.hop"] == pytest.approx(0.002)


@given(
    stamps=st.dictionaries(
        st.sampled_from([p for p, _ in chain(handed_over=True, retried=True)]), st.integers(-50, 200)
    ),
    written=st.integers(0, 100),
    mode=st.sampled_from([None, *Mode]),
)
def test_parts_always_sum_to_ttft(stamps: dict[int, int], written: int, mode: Mode | None) -> None:
    """Whatever was stamped, in whatever order, no part is negative and nothing is counted twice."""
    points = {**stamps, int(Point.RECEIVED): 0, int(Point.FIRST_BYTE_WRITTEN): written}
    timings = split(points, chain(handed_over=mode is not None, retried=True), 0, mode)
    assert all(part >= 0 for part in timings.parts.values())
    assert timings.unattributed >= 0
    assert sum(timings.parts.values()) + timings.unattributed == pytest.approx(timings.ttft, abs=1e-12)


def test_one_boot_shares_the_clock() -> None:
    """Equal boot ids compare directly."""
    stamps = Stamps("b", {5: 100, 6: 200})
    assert shifted(stamps, skew(stamps, "b", 0, 1000)) == {5: 100, 6: 200}


def test_another_hosts_clock_is_set_by_the_round_trip() -> None:
    """The way there and the way back take equally long; what lies between keeps its length."""
    stamps = Stamps("other", {5: 10_100, 7: 10_500})
    assert shifted(stamps, skew(stamps, "b", 0, 600)) == {5: 100, 7: 500}
    assert skew(Stamps("other", {}), "b", 0, 600) == SAME_CLOCK
