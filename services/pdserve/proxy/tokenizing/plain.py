"""The simulated engine's tokenizer, "bytes": ids 0 to 255 are bytes, 256 begins, 257 ends a text."""

from pdserve.proxy.types import Chat


class BytesTokenizer:
    """UTF-8 bytes as ids."""

    def encode(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode())

    def render(self, chat: Chat) -> str:
        """One line a turn, and the assistant's name."""
        return "".join(f"{turn.role}: {turn.content}\n" for turn in chat.turns) + "assistant: "

    def encode_rendered(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode())
