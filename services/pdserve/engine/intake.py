"""What a service can know of a request before its engine is asked: sizes, ids, one-shot transfers."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdserve.engine.port import EngineInfo
from pdserve.rpc.errors import ContextExceeded, EmptyPrompt, InvalidRequest, PoolExceeded, TransferUsed

TRANSFER_ID_BYTES = 16
REMEMBERED = 65_536
"""Ended transfer ids that are still refused; kvd remembers them too."""


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest where it would spoil a log line."""
    if len(request_id) > 256 or not request_id.isprintable():
        raise InvalidRequest("request_id must be at most 256 printable characters")


def check_prompt(info: EngineInfo, prompt: Sequence[int], answer_tokens: int = 1) -> None:
    """Refuses a prompt that this engine can never serve with `answer_tokens` more.

    Raises:
        EmptyPrompt: it has no token.
        InvalidRequest: a token that the vocabulary does not have.
        ContextExceeded: prompt and answer do not fit the context.
        PoolExceeded: they need more blocks than the whole pool has.
    """
    if not prompt:
        raise EmptyPrompt("the prompt has no token")
    if max(prompt) >= info.vocab_size:
        raise InvalidRequest(f"token id {max(prompt)} is outside the vocabulary of {info.vocab_size}")
    tokens = len(prompt) + answer_tokens
    if tokens > info.max_model_len:
        raise ContextExceeded(
            f"{len(prompt)} prompt tokens and {answer_tokens} to answer exceed the context of {info.max_model_len}",
            prompt_tokens=str(len(prompt)),
            max_model_len=str(info.max_model_len),
        )
    # The last token of an answer is never computed on, so its KV needs no place.
    blocks = -(-(tokens - 1) // info.block_size)
    if blocks > info.num_blocks:
        raise PoolExceeded(
            f"prompt and answer need {blocks} KV blocks, the engine has {info.num_blocks}",
            needed=str(blocks),
            pool=str(info.num_blocks),
        )


def check_transfer_id(transfer_id: bytes) -> None:
    """Raises InvalidRequest where it is not 16 bytes."""
    if len(transfer_id) != TRANSFER_ID_BYTES:
        raise InvalidRequest(f"transfer_id has {len(transfer_id)} bytes, not {TRANSFER_ID_BYTES}")


class OneShot:
    """Transfer ids that this service has seen: each is good once."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._seen: set[bytes] = set()
        self._ended: deque[bytes] = deque()
        self._remembered = remembered

    @contextmanager
    def claim(self, transfer_id: bytes) -> Iterator[None]:
        """Holds an id for one request.

        Raises:
            InvalidRequest: it is not 16 bytes.
            TransferUsed: another request has it, or had it.
        """
        check_transfer_id(transfer_id)
        if transfer_id in self._seen:
            raise TransferUsed(f"transfer {transfer_id.hex()} has been used", transfer_id=transfer_id.hex())
        self._seen.add(transfer_id)
        try:
            yield
        finally:
            self._ended.append(transfer_id)
            if len(self._ended) > self._remembered:
                self._seen.discard(self._ended.popleft())
