"""Parameters that others have and pdserve has not.

One that OpenAI or vLLM has is UNSUPPORTED_PARAMETER, unless its value asks for nothing; any other unknown name is
UNKNOWN_FIELD.
"""

from collections.abc import Mapping
from typing import Any

_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": _NOTHING,
    "best_of": (None, 1),
    "echo": _NOTHING,
    "function_call": (*_NOTHING, "none"),
    "functions": _NOTHING,
    "logit_bias": _NOTHING,
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": _NOTHING,
    "reasoning_effort": _NOTHING,
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": _NOTHING,
    "suffix": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "tools": _NOTHING,
    "verbosity": _NOTHING,
    "web_search_options": (None,),
    # vLLM
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None,),
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
    "cache_salt": _NOTHING,
    "chat_template": _NOTHING,
    "chat_template_kwargs": _NOTHING,
    "continue_final_message": _NOTHING,
    "documents": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_reasoning": (None, True, False),
    "include_stop_str_in_output": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": (None, 1),
    "logits_processors": _NOTHING,
    "min_p": (None, 0),
    "mm_processor_kwargs": _NOTHING,
    "priority": (None, 0),
    "prompt_logprobs": (None,),
    "return_token_ids": _NOTHING,
    "return_tokens_as_token_ids": _NOTHING,
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": _NOTHING,
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _NOTHING,
    "vllm_xargs": _NOTHING,
}
"""Parameters that are refused by name, each with the values that ask for nothing."""

IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
"""Who asks, and hints: they never shape an answer."""

UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("name", "tool_calls", "tool_call_id", "function_call", "audio", "refusal"), _NOTHING
)
"""The same of one message of a chat."""
