"""Prompts to ids: Hugging Face's files read the way transformers reads them, off the loop, once."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pdserve.proxy.tokenizing.hf import HfTokenizer
from pdserve.proxy.tokenizing.plain import BytesTokenizer
from pdserve.proxy.tokenizing.shelf import IN_PLACE, Shelf
from pdserve.proxy.types import Chat, TokenIds, Turn
from pdserve.rpc.errors import ConfigError, DeadlinePassed, EmptyPrompt, InvalidRequest, Unavailable

WORDS = {"<s>": 0, "</s>": 1, "[UNK]": 2, "hello": 3, "world": 4, "user": 5, "assistant": 6, ":": 7}
CHATML = """{{ bos_token }}{% for message in messages %}
  {% if message['role'] not in ['system', 'user', 'assistant'] %}
    {{ raise_exception('unknown role ' ~ message.role) }}
  {% endif %}
{{ message['role'] }}: {{ message['content'] | trim }}
{% if message['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{%- endif %}"""


def folder(path: Path, template: Any = CHATML, **config: Any) -> Path:
    """A tokenizer's folder; its file carries the training's truncation and padding."""
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(path / "tokenizer.json"))
    written = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(written | config))
    return path


def chat(*turns: tuple[str, str]) -> Chat:
    """A conversation."""
    return Chat(tuple(Turn(role, content) for role, content in turns))


def test_text_gets_special_tokens_and_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    """tokenizer.json's truncation and padding are the training's, not the server's."""
    tokenizer = HfTokenizer.load(folder(tmp_path))
    assert tokenizer.encode("hello world hello world hello") == [0, 3, 4, 3, 4, 3]


def test_a_chat_is_rendered_as_transformers_would(tmp_path: Path) -> None:
    """Blocks are trimmed, both forms of special tokens are known, the generation tag is transparent."""
    tokenizer = HfTokenizer.load(folder(tmp_path))
    text = tokenizer.render(chat(("user", " hello "), ("assistant", "world")))
    assert text == "<s>user: hello\nassistant: world\n</s>assistant:"
    assert tokenizer.encode_rendered("hello") == [3], "the template has placed the special tokens"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, "unknown role robot"),
        ("{{ messages[0].nothing.more }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages: ZeroDivisionError"),
        ("{{ '{}'.format() }}", "refuses these messages: IndexError"),
        ("{{ '%(x)s' % {} }}", "refuses these messages: KeyError"),
        ("{% for i in range(10000000) %}{% endfor %}", "refuses these messages: OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses these messages: RecursionError"),
        ("{{ ''.__class__.__mro__ }}{{ messages.__class__.x() }}", "refuses these messages"),
        (None, "no chat template"),
    ],
)
def test_a_template_may_refuse_and_may_not_escape(tmp_path: Path, template: str | None, said: str) -> None:
    """What the template raises, and what the sandbox forbids, is an error of the request."""
    tokenizer = HfTokenizer.load(folder(tmp_path, template))
    with pytest.raises(InvalidRequest, match=said) as caught:
        tokenizer.render(chat(("robot", "hello")))
    assert caught.value.metadata["param"] == "messages"


def test_the_template_beside_the_config_wins(tmp_path: Path) -> None:
    """chat_template.jinja is where newer models have it; of several in the config, "default" is taken."""
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert HfTokenizer.load(folder(tmp_path, several)).render(chat(("user", "x"))) == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}{{ strftime_now('%Y')[:2] }}")
    assert HfTokenizer.load(tmp_path).render(chat(("user", "<ü>"))) == '[{"role": "user", "content": "<ü>"}]20'


@pytest.mark.parametrize("damage", ["missing", "json", "template"])
def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path, damage: str) -> None:
    """CONFIG with the folder's name, whatever is wrong in it."""
    if damage != "missing":
        folder(tmp_path, "{% if %}" if damage == "template" else CHATML)
    if damage == "json":
        (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        HfTokenizer.load(tmp_path)


def test_bytes_are_bytes() -> None:
    """The simulated engine's tokenizer."""
    tokenizer = BytesTokenizer()
    assert tokenizer.encode("aü") == [97, 0xC3, 0xBC]
    assert tokenizer.render(chat(("user", "x"))) == "user: x\nassistant: "


class Slow(BytesTokenizer):
    """Notes where it runs, and waits there until it may go on."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def encode(self, text: str) -> list[int]:
        """As BytesTokenizer."""
        self.threads.append(threading.current_thread().name)
        self.go_on.wait(10.0)
        return super().encode(text)


async def test_long_prompts_leave_the_event_loop() -> None:
    """A short one is tokenised in place, a long one in a thread, within the request's deadline."""
    slow = Slow()
    shelf = Shelf({}, load=lambda name: slow)
    shelf.announce("m", "any")
    assert await shelf.tokenize("m", "ab", 5.0) == (97, 98)
    assert len(await shelf.tokenize("m", "a" * (IN_PLACE + 1), 5.0)) == IN_PLACE + 1
    assert [name.startswith("tokenize") for name in slow.threads] == [False, True]
    slow.go_on.clear()
    with pytest.raises(DeadlinePassed):
        await shelf.tokenize("m", "a" * (IN_PLACE + 1), 0.01)
    slow.go_on.set()
    shelf.close()


async def test_the_loop_turns_while_a_long_prompt_is_tokenised(tmp_path: Path) -> None:
    """A thread is not enough: the tokenizer has to let go of the interpreter, too."""
    shelf = Shelf({}, load=lambda name: HfTokenizer.load(folder(tmp_path)))
    shelf.announce("m", "any")
    await shelf.tokenize("m", "hello", 10.0)
    work = asyncio.ensure_future(shelf.tokenize("m", "hello world " * 100_000, 30.0))
    worst, last = 0.0, time.perf_counter()
    begun = last
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    print(f"tokenised in {last - begun:.3f} s, longest pause of the loop {worst:.3f} s")
    assert len(await work) == 200_001
    assert worst < 0.7 * (last - begun)
    shelf.close()


async def test_a_missing_tokenizer_leaves_token_ids() -> None:
    """Text is UNAVAILABLE with the reason; token ids need no tokenizer; a new announcement tries again."""
    found: list[str] = []

    def load(name: str) -> BytesTokenizer:
        found.append(name)
        if len(found) == 1:
            raise ConfigError("no tokenizer.json in /nowhere")
        return BytesTokenizer()

    shelf = Shelf({"m": "/override"}, load=load)
    with pytest.raises(Unavailable, match="no engine has announced"):
        await shelf.tokenize("m", "a", 1.0)
    shelf.announce("m", "/nowhere")
    with pytest.raises(Unavailable, match=r"no tokenizer\.json in /nowhere; give token ids"):
        await shelf.tokenize("m", "a", 1.0)
    assert await shelf.tokenize("m", TokenIds((1, 2)), 1.0) == (1, 2)
    shelf.announce("m", "/nowhere")
    assert await shelf.tokenize("m", "a", 1.0) == (97,)
    shelf.announce("m", "/nowhere")
    assert found == ["/override", "/override"], "loaded once, from where the operator said"
    shelf.close()


async def test_nothing_to_compute_is_an_error() -> None:
    """EMPTY_PROMPT, for text, ids, and a conversation that renders to nothing."""
    shelf = Shelf({}, load=lambda name: BytesTokenizer())
    shelf.announce("m", "any")
    for prompt in ("", TokenIds(())):
        with pytest.raises(EmptyPrompt):
            await shelf.tokenize("m", prompt, 1.0)
    shelf.close()
