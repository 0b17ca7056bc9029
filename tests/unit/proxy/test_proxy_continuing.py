"""Where an answer is taken up again: against engines whose text is made as vLLM makes it, over a real
byte-level tokenizer. Fake: the model, whose next token follows from the tokens so far."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from pdserve.proxy.continuing import Diverged, Part, Telling
from pdserve.proxy.types import Candidate, Delta, Finish, Position, Sampling

LETTERS = ["a", "b", " ", "é", "漢", "🎉"]


def byte_tokenizer() -> Tokenizer:
    """One token a byte, as a byte-level BPE without merges has it; characters take one to four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


TOKENIZER = byte_tokenizer()
SPELLED = {letter: tuple(TOKENIZER.encode(letter).ids) for letter in LETTERS}
EOS = 999
PROMPT = tuple(TOKENIZER.encode("say: 漢").ids)


def next_token(tokens: Sequence[int], salt: str = "") -> int:
    """The rest of a character that has begun, else the first byte of one that follows from all so far."""
    for back in (3, 2, 1):
        tail = tuple(tokens[-back:])
        for spelling in SPELLED.values():
            if len(spelling) > back and spelling[:back] == tail:
                return spelling[back]
    draw = random.Random(f"{salt}{tuple(tokens)}").randrange(40)
    return EOS if draw == 39 else SPELLED[LETTERS[draw % len(LETTERS)]][0]


def engine(part: Part, chunks: random.Random | None = None, salt: str = "") -> Iterator[Delta]:
    """An attempt's deltas. Text, stop strings and hold-back are vLLM's FastIncrementalDetokenizer's, and
    where `chunks` says so several outputs come as one, as they do when the reader is late."""
    sampling = part.sampling
    stream = DecodeStream(ids=list(part.prompt), skip_special_tokens=True)
    held = max((len(stop) for stop in sampling.stop), default=1) - 1
    tokens, text, sent = list(part.prompt), "", 0
    waiting: Delta | None = None
    for count in range(1, (sampling.max_tokens or 0) + 1):
        token = next_token(tokens, salt)
        tokens.append(token)
        finish, reason = None, ""
        may_stop = count > sampling.min_tokens
        if token == EOS and (may_stop and not sampling.ignore_eos):
            finish = Finish.STOP
        elif may_stop and token in sampling.stop_token_ids:
            finish, reason = Finish.STOP, str(token)
        else:
            before = len(text)
            text += (stream.step(TOKENIZER, token) or "") if token != EOS else ""
            ends = [
                (at, stop)
                for stop in sampling.stop
                if len(text) > before and (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if may_stop and ends:
                at, reason = min(ends)
                text, finish = text[:at], Finish.STOP
            elif count == sampling.max_tokens:
                finish = Finish.LENGTH
        end = len(text) if finish else max(sent, len(text) - held)
        logprobs = (Position(Candidate(token, "", -float(len(tokens))), ()),)
        said = Delta(0, text[sent:end], (token,), logprobs, finish, reason)
        sent = end
        waiting = said if waiting is None else joined(waiting, said)
        if finish or chunks is None or chunks.random() < 0.7:
            yield waiting
            waiting = None
        if finish:
            return


def joined(first: Delta, then: Delta) -> Delta:
    """Two deltas as one."""
    return replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
    )


def whole(deltas: Sequence[Delta]) -> Delta:
    """What a client has in the end."""
    last = deltas[0]
    for delta in deltas[1:]:
        last = joined(last, delta)
    return last


def asked(**sampling: Any) -> Part:
    """A greedy request of 60 tokens."""
    return Part(PROMPT, Sampling(**({"max_tokens": 60, "temperature": 0.0} | sampling)))


@settings(max_examples=200, deadline=None)
@given(
    stop=st.lists(st.text("ab é漢🎉", min_size=1, max_size=6), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.sampled_from([spelling[-1] for spelling in SPELLED.values()]), max_size=1).map(tuple),
    min_tokens=st.integers(0, 40),
    ignore_eos=st.booleans(),
    salt=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    late=st.booleans(),
)
def test_a_greedy_answer_that_broke_off_is_the_one_that_did_not(
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    min_tokens: int,
    ignore_eos: bool,
    salt: int,
    cuts: list[int],
    late: bool,
) -> None:
    """Cut anywhere, several times: inside a character, inside a stop string, in front of the last token. Tokens,
    text, log probabilities, finish and stop reason are those of the uninterrupted answer."""
    whole_part = asked(stop=stop, stop_token_ids=stop_token_ids, min_tokens=min_tokens, ignore_eos=ignore_eos)
    expected = whole(list(engine(whole_part, salt=str(salt))))
    chunks = random.Random(salt) if late else None
    telling, part, got = Telling(whole_part), whole_part, list[Delta]()
    for cut in [*cuts, None]:
        for number, delta in enumerate(engine(part, chunks, str(salt))):
            if number == cut:
                break
            new = telling.hear(delta)
            got += [] if new is None else [new]
        if telling.complete:
            break
        resumed = telling.resume()
        assert resumed is not None
        part = resumed
    assert telling.complete
    assert whole(got) == expected
    assert telling.count == len(expected.token_ids)


@settings(max_examples=100, deadline=None)
@given(salt=st.integers(0, 10_000), cut=st.integers(1, 50), late=st.booleans())
def test_a_sampled_answer_goes_on_only_where_nothing_is_said_twice(salt: int, cut: int, late: bool) -> None:
    """The second engine draws other tokens: the seam lies behind the last one, at the end of a character, or there
    is none; text and tokens fit together."""
    telling = Telling(asked(temperature=1.0, ignore_eos=True))
    got = list[Delta]()
    for number, delta in enumerate(engine(asked(ignore_eos=True), random.Random(salt) if late else None, str(salt))):
        if number == cut:
            break
        got += [delta]
        assert telling.hear(delta) == delta
    part = telling.resume() if not telling.complete else None
    text = TOKENIZER.decode(list(whole(got).token_ids))
    if part is None:
        assert telling.complete or text.endswith("\ufffd") or len(got[-1].token_ids) > 1 or not got[-1].text
        return
    assert not text.endswith("\ufffd")
    assert len(part.prompt) == len(PROMPT) + telling.count
    got += [new for delta in engine(part, None, f"other {salt}") if (new := telling.hear(delta)) is not None]
    answer = whole(got)
    decoded = TOKENIZER.decode([token for token in answer.token_ids if token != EOS])
    assert answer.text == decoded.rstrip("\ufffd"), "a character that the last token left open is never said"
    assert (len(answer.token_ids), answer.finish) == (60, Finish.LENGTH)


def test_a_seam_inside_a_character_would_say_the_prompt() -> None:
    """Why there is none: what the detokeniser of vLLM does with a prompt that ends inside a character."""
    party = SPELLED["🎉"]
    stream = DecodeStream(ids=[*PROMPT, *party[:2]], skip_special_tokens=True)
    assert stream.step(TOKENIZER, party[2]) is None
    assert stream.step(TOKENIZER, party[3]) == "say: 漢🎉"
    telling = Telling(asked())
    for token, text in zip((*SPELLED["a"], *party[:2]), ("a", "", ""), strict=True):
        telling.hear(Delta(0, text, (token,)))
    part = telling.resume()
    assert part == Part(PROMPT + SPELLED["a"], replace(asked().sampling, max_tokens=59))


@pytest.mark.parametrize(
    ("sampling", "goes_on"),
    [
        ({}, True),
        ({"seed": 3}, True),
        ({"repetition_penalty": 1.3}, True),
        ({"temperature": None}, True),
        ({"temperature": 0.7, "stop": ("x",)}, True),
        ({"temperature": 0.7, "stop": ("xy",)}, False),
        ({"temperature": 0.7, "seed": 3}, False),
        ({"temperature": None, "seed": 3}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -0.5}, False),
        ({"n": 2}, False),
        ({"max_tokens": 2}, False),
    ],
)
def test_what_can_go_on(sampling: dict[str, Any], goes_on: bool) -> None:
    """Only where the next token would be chosen as if nothing had happened."""
    telling = Telling(asked(**sampling))
    for _ in range(2):
        telling.hear(Delta(0, "a", SPELLED["a"]))
    assert (telling.resume() is not None) is goes_on


def test_limits_shrink_by_what_was_given() -> None:
    """max_tokens and min_tokens count the answer's tokens, wherever they were made."""
    telling = Telling(asked(max_tokens=10, min_tokens=5, logprobs=2, stop_token_ids=(7,)))
    for _ in range(3):
        telling.hear(Delta(0, "a", SPELLED["a"]))
    part = telling.resume()
    assert part is not None
    assert part.sampling == Sampling(max_tokens=7, min_tokens=2, logprobs=2, stop_token_ids=(7,), temperature=0.0)
    for _ in range(3):
        telling.hear(Delta(0, "a", SPELLED["a"]))
    again = telling.resume()
    assert again is not None
    assert (again.sampling.max_tokens, again.sampling.min_tokens) == (4, 0)
    assert again.prompt == PROMPT + SPELLED["a"] * 6


@pytest.mark.parametrize(
    "other", [Delta(0, "a", (5,)), Delta(0, "b", SPELLED["a"]), Delta(0, "", (), finish=Finish.STOP)]
)
def test_another_answer_is_not_joined_on(other: Delta) -> None:
    """What comes again must be what the client has: token, text, and not the end."""
    telling = Telling(asked(stop=("never",)))
    for text in ("", "", "", "", "a"):
        telling.hear(Delta(0, text, SPELLED["a"]))
    assert telling.resume() == asked(stop=("never",))
    for text in ("", "", "", ""):
        assert telling.hear(Delta(0, text, SPELLED["a"])) is None
    with pytest.raises(Diverged):
        telling.hear(other)


def test_several_answers_are_complete_together() -> None:
    """n = 2: passed on untouched, counted together, complete with the last."""
    telling = Telling(asked(n=2))
    for index in (1, 0):
        assert not telling.complete
        delta = Delta(index, "a", (1,), finish=Finish.STOP)
        assert telling.hear(delta) is delta
    assert telling.complete
    assert telling.count == 2
