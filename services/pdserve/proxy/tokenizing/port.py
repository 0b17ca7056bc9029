"""What the proxy needs of a tokenizer."""

from typing import Protocol

from pdserve.proxy.types import Chat


class Tokenizer(Protocol):
    """One model's tokenizer and chat template. Thread-safe; no call touches a file."""

    def encode(self, text: str) -> list[int]:
        """A text prompt as ids, with the special tokens that the model wants around a text."""
        ...

    def render(self, chat: Chat) -> str:
        """A conversation as text, up to where the assistant speaks.

        Raises:
            InvalidRequest: the template refuses the conversation, or the model has no template.
        """
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """A rendered conversation as ids; the template has placed the special tokens."""
        ...
