"""What the proxy tells the process that draws is all that a trace shows; and a record's spans are counted undrawn."""

from dataclasses import replace

import pytest
from hypothesis import given

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.size import most_spans
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.wire import Report, pack, pack_report, unpack, unpack_report
from pdserve.proxy.types import Mode
from tests.unit.proxy.records import OFFSET, record
from tests.unit.proxy.test_proxy_tracing import records


@given(records())
def test_a_record_comes_through(one: Ended) -> None:
    """Equal in every field, whatever was stamped; so is what is drawn of it."""
    got = unpack(pack(one, OFFSET))
    assert (got.ended, got.offset_ns) == (one, OFFSET)
    assert [tried.course for tried in got.ended.attempts] == [tried.course for tried in one.attempts]
    assert spans_of(got.ended, OFFSET) == spans_of(one, OFFSET)


def test_a_clients_words_that_no_trace_shows_stay_here() -> None:
    """Strings and tokens that end an answer; all else of what was asked goes along."""
    usual = record()
    asked = replace(usual.sampling, stop=("secret",), stop_token_ids=(7,))
    sent = pack(replace(usual, sampling=asked), OFFSET)
    assert b"secret" not in sent
    assert sent == pack(usual, OFFSET)


def test_text_without_bytes_is_escaped() -> None:
    """Half a surrogate pair, wherever it is: the rest comes through as it is."""
    usual = record(model="m\udfff", error="a\ud800b")
    assert unpack(pack(usual, OFFSET)).ended == replace(usual, model="m\\udfff", error="a\\ud800b")


def test_a_number_that_is_too_large_is_an_error() -> None:
    """Which the sink logs: nothing else than the record's trace is lost."""
    with pytest.raises(OverflowError):
        pack(record(prompt_tokens=1 << 64), OFFSET)


def test_reports() -> None:
    """As they are sent."""
    report = Report(1, 2, 3, 4, 5, "why")
    assert unpack_report(pack_report(report)) == report


@given(records())
def test_no_record_has_more_spans_than_are_counted(one: Ended) -> None:
    """So that what was lost is never said to be less than it was."""
    assert len(spans_of(one, OFFSET)) <= most_spans(one)


@pytest.mark.parametrize("mode", list(Mode))
def test_of_a_usual_record_they_are_counted_exactly(mode: Mode) -> None:
    """Each part is long enough to be drawn."""
    assert most_spans(record(mode)) == len(spans_of(record(mode), OFFSET))
