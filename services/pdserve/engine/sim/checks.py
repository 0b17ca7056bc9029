"""What a simulated engine refuses at once. Pure."""

from pdserve.engine.handoff import params as handoff_params
from pdserve.engine.port import Request
from pdserve.engine.sim.answer import MAX_LOGPROBS
from pdserve.engine.sim.config import VOCAB_SIZE, SimConfig
from pdserve.rpc.errors import ContextExceeded, EmptyPrompt, InvalidRequest, PoolExceeded


def check_request(config: SimConfig, request: Request) -> None:
    """Whether the engine can serve a request at all.

    Raises:
        EmptyPrompt: no token.
        ContextExceeded: no room for an answer in the model's context.
        PoolExceeded: no room for it in the pool.
        InvalidRequest: a token, parameter or part in a hand-over that cannot be meant.
    """
    sampling, count = request.sampling, len(request.prompt)
    if not count:
        raise EmptyPrompt("the prompt has no token")
    if count >= config.max_model_len:
        raise ContextExceeded(
            f"the prompt has {count} tokens; the context holds {config.max_model_len} with the answer"
        )
    if count >= config.context:
        raise PoolExceeded(f"the prompt has {count} tokens; the pool holds {config.num_blocks * config.block_size}")
    if odd := [token for token in request.prompt if not 0 <= token < VOCAB_SIZE]:
        raise InvalidRequest(f"token {odd[0]} is not in the vocabulary of {VOCAB_SIZE}")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs must be 0 to {MAX_LOGPROBS}, not {sampling.logprobs}")
    if request.kv is not None:
        handoff_params.check(request.kv)
