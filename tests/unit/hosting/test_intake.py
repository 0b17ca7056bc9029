"""What a service refuses by itself, and how it adds up what kvd says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine import ends
from pdserve.engine.checks import check_prompt
from pdserve.engine.hosting.intake import OneShot, check_request_id
from pdserve.engine.hosting.testing import INFO
from pdserve.kvd.client.messages import End, Facts, Outcome
from pdserve.rpc import errors

TID = bytes(16)


@pytest.mark.parametrize(
    ("prompt", "answer", "kind"),
    [
        (0, 1, errors.EmptyPrompt),
        (256, 1, errors.ContextExceeded),
        (255, 1, None),
        (255, 2, errors.ContextExceeded),
        (32, 1, None),
        (1, 32, None),
        (1, 256, errors.ContextExceeded),
    ],
)
def test_prompt_and_answer_fit_the_context(prompt: int, answer: int, kind: type[Exception] | None) -> None:
    """At the edges, to the token."""
    if kind is None:
        check_prompt(INFO, [0] * prompt, answer)
        return
    with pytest.raises(kind):
        check_prompt(INFO, [0] * prompt, answer)


@given(prompt=st.integers(1, 100), answer=st.integers(1, 100))
def test_the_pool_is_counted_in_whole_blocks(prompt: int, answer: int) -> None:
    """All tokens but the last one sampled have KV; they fit exactly or are refused."""
    small = replace(INFO, num_blocks=4, block_size=8)
    if prompt + answer - 1 <= 32:
        check_prompt(small, [0] * prompt, answer)
        return
    with pytest.raises(errors.PoolExceeded) as raised:
        check_prompt(small, [0] * prompt, answer)
    assert raised.value.metadata["pool"] == "4"


def test_tokens_are_of_the_vocabulary() -> None:
    """The largest id is the last that is taken."""
    check_prompt(INFO, [INFO.vocab_size - 1])
    with pytest.raises(errors.InvalidRequest, match="258"):
        check_prompt(INFO, [0, INFO.vocab_size])


@pytest.mark.parametrize("request_id", ["a\nb", "\x1b[31m", "x" * 257])
def test_a_request_id_cannot_spoil_the_log(request_id: str) -> None:
    """Nor can it be endless; an empty one is fine."""
    check_request_id("")
    check_request_id("x" * 256)
    with pytest.raises(errors.InvalidRequest):
        check_request_id(request_id)


def test_transfer_ids_are_remembered_but_not_for_ever() -> None:
    """The oldest ended one is forgotten first; one in use never is."""
    shots = OneShot(remembered=2)
    ids = [bytes([number]) * 16 for number in range(5)]
    with shots.claim(ids[0]):
        for tid in ids[1:4]:
            with shots.claim(tid):
                pass
        for tid in (ids[0], ids[2], ids[3]):
            with pytest.raises(errors.TransferUsed), shots.claim(tid):
                pass
        with shots.claim(ids[1]):
            pass


def test_a_claim_ends_with_an_error_too() -> None:
    """And stays used."""
    shots = OneShot()
    with pytest.raises(errors.EmptyPrompt), shots.claim(TID):
        raise errors.EmptyPrompt("x")
    with pytest.raises(errors.TransferUsed), shots.claim(TID):
        pass


def end(outcome: Outcome, reason: str = "", detail: str = "") -> End:
    """An end."""
    return End("h", TID, outcome, reason, detail, Facts(kv_bytes=5, blocks=1, transport="shm"))


def test_an_end_is_an_error_of_its_reason() -> None:
    """With kvd's words where it has any; a reason of a newer kvd is still an error."""
    error = ends.error_of(end(Outcome.FAILED, "PEER_LOST", "rank 0 is gone"))
    assert (type(error), error.message) == (errors.PeerLost, "rank 0 is gone")
    assert type(ends.error_of(end(Outcome.EXPIRED))) is errors.TransferFailed
    assert ends.error_of(end(Outcome.FAILED, "NEW_REASON")).metadata == {"reason": "NEW_REASON"}


def test_an_end_in_the_log_says_what_matters() -> None:
    """Bytes where it is good, the reason where it is not."""
    assert ends.words(end(Outcome.LANDED)) == {"outcome": "landed", "kv_bytes": 5, "blocks": 1, "transport": "shm"}
    said = ends.words(end(Outcome.CANCELLED, "CANCELLED", "left"))
    assert said == {"outcome": "cancelled", "reason": "CANCELLED", "detail": "left"}


def test_facts_add_up() -> None:
    """Bytes add, the span grows; a consumer that needed nothing does not spoil it."""
    some = Facts(10, 2, 4, 1, 7, "shm", first_post_ns=20, landed_ns=30, overlapped_bytes=5, offered_ns=9, accepted_ns=8)
    later = replace(some, first_post_ns=25, landed_ns=40, last_byte_ns=35)
    nothing = Facts(layers=4, ranks=1, accepted_ns=11)
    total = ends.sum_facts([nothing, some, later])
    assert total == Facts(20, 4, 4, 1, 14, "shm", 20, 40, 10, 9, 11, 35)
    assert ends.sum_facts([]) is None
