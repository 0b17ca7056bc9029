"""What somebody types or pastes as an id, and what it finds."""

import pytest

from pdserve.traces import ids, otlp
from tests.unit.traces import made
from tests.unit.traces.conftest import File

REQUEST = "5f0dc33ce88412f976fd504a0d65f8f2"
OTHER = "5f0dc33c000000000000000000000000"
NOW = made.START + 60 * 10**9


def test_ids_are_read_as_people_write_them(file: File) -> None:
    """A request by its id in any case, with spaces around, as an answer of the OpenAI API has it, and by its first 8
    digits or more; a trace likewise; all that begin so, where several do; a whole id before a beginning."""
    given = [made.request(n) for n in (1, 2, 3)]
    for trace, called in zip(given, (REQUEST, OTHER, "my-Own"), strict=True):
        root = trace.spans[made.PROXY][0]
        for pair in root.attributes:
            if pair.key == "pdserve.request_id":
                pair.value.string_value = called
    file.writer().add(otlp.decode(made.export(*given)).spans, NOW)
    reader = file.reader()

    def found(text: str) -> list[str]:
        return sorted(row.request_id for row in reader.requests(10, called=text))

    for text in (
        REQUEST, REQUEST.upper(), f"  {REQUEST}\n", f"chatcmpl-{REQUEST}", f"cmpl-{REQUEST}",
        f"ChatCmpl-{REQUEST.upper()}",        REQUEST[:9], f"cmpl-{REQUEST[:12].upper()}",
        made.Made(1).hex, made.Made(1).hex.upper(), f" {made.Made(1).hex}",
    ):  # fmt: skip
        assert found(text) == [REQUEST], text
    assert found(REQUEST[:8]) == [OTHER, REQUEST]
    assert found(made.Made(1).hex[:31]) == sorted([REQUEST, OTHER, "my-Own"])
    assert found("my-Own") == found("cmpl-my-Own") == ["my-Own"]
    for text in (REQUEST[:7], "my-O", "cmpl-", "zzzzzzzz", "%", "chatcmpl-chatcmpl-" + REQUEST):
        assert found(text) == [], text


@pytest.mark.parametrize(
    ("text", "trace"),
    [("1234", f"{0x1234:032x}"), (" ABCD ", f"{0xABCD:032x}"), ("zz", ""), ("", ""), ("1" * 33, ""), ("-1", "")],
)
def test_a_traces_id_is_filled_up(text: str, trace: str) -> None:
    """As Jaeger does; what is no id of a trace is none."""
    assert ids.trace(text) == trace
