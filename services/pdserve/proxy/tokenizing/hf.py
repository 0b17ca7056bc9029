"""Hugging Face tokenizers: tokenizer.json and the chat template, without transformers or torch.

The template runs in the environment that transformers gives it: sandboxed and immutable, blocks
trimmed, `tojson` that escapes nothing, `raise_exception`, `strftime_now`, loop controls, and
`{% generation %}` as plain text.
"""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer as Backend

from pdserve.proxy.types import Chat
from pdserve.rpc.errors import ConfigError, InvalidRequest

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HfTokenizer:
    """One folder's tokenizer."""

    def __init__(self, backend: Backend, template: str | None, special: dict[str, str]) -> None:
        """`template`: None where the model has none; `special`: bos_token and the like, by name."""
        self._backend = backend
        self._template = _environment().from_string(template) if template is not None else None
        self._special = special

    @classmethod
    def load(cls, folder: Path) -> "HfTokenizer":
        """Reads a folder; blocking.

        Raises:
            ConfigError: tokenizer.json is missing, or one of the files cannot be read as what it is.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {folder}")
        try:
            backend = Backend.from_str(path.read_text(encoding="utf-8"))
            # A file may carry the settings of its training; a server neither cuts nor pads.
            backend.no_truncation()
            backend.no_padding()
            config = _read_json(folder / "tokenizer_config.json")
            return cls(backend, _template(folder, config), _special_tokens(config))
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template in {folder}: {error}") from error
        except OSError as error:
            raise ConfigError(f"tokenizer in {folder}: {error}") from error
        except ConfigError:
            raise
        except Exception as error:  # `tokenizers` raises a bare one for a bad file
            raise ConfigError(f"tokenizer in {folder}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self._ids(text, special=True)

    def encode_rendered(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self._ids(text, special=False)

    def render(self, chat: Chat) -> str:
        """See Tokenizer."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; ask for a completion", param="messages")
        messages = [{"role": turn.role, "content": turn.content} for turn in chat.turns]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # a template is a program, and what it meets is the client's
            said = f"the chat template refuses these messages: {type(error).__name__}: {error}"
            raise InvalidRequest(said, param="messages") from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # Only the batch calls let go of the GIL: `encode` would hold the event loop up from its thread.
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here its body is kept."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a plain attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Drops the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as transformers has it


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return found


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's, of several the one named "default"."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """A token is written as text, or as an object with `content`."""
    text: Callable[[Any], Any] = lambda token: token.get("content") if isinstance(token, dict) else token  # noqa: E731
    tokens = {name: text(config.get(name)) for name in _SPECIAL}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}
