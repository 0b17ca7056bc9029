"""What no engine can serve, from its facts alone: known before it is asked. Pure."""

from collections.abc import Sequence

from pdserve.engine.port import EngineInfo
from pdserve.kvd.types import TRANSFER_ID_BYTES
from pdserve.rpc.errors import ContextExceeded, EmptyPrompt, InvalidRequest, PoolExceeded


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
