"""Generators of requests whose token will be dropped are out of reach while vLLM samples."""

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from pdserve.engine.vllm import seeds


def patched(fails: bool) -> Any:
    """A runner as vLLM's: rows 0 and 1 are seeded, row 1 is in the middle of its prompt."""

    class Runner:
        def __init__(self) -> None:
            self.input_batch = SimpleNamespace(generators={0: "a", 1: "b"})
            self.discard_request_mask = SimpleNamespace(np=numpy.array([False, True, False, True]))

        def sample_tokens(self, grammar: Any) -> tuple[Any, dict[int, str]]:
            """What it was given, and the generators that it could use."""
            if fails:
                raise ValueError("no tokens")
            return grammar, dict(self.input_batch.generators)

    seeds.install(Runner)
    seeds.install(Runner)  # safe twice
    return Runner()


def test_a_dropped_token_is_not_drawn_from_its_request_s_generator() -> None:
    """The generator is away during the call, and back in the very dict that vLLM's sampling holds."""
    runner = patched(fails=False)
    held = runner.input_batch.generators
    assert runner.sample_tokens("g") == ("g", {0: "a"})
    assert runner.input_batch.generators is held
    assert held == {0: "a", 1: "b"}


def test_a_step_that_fails_gives_the_generators_back() -> None:
    """What vLLM raises comes out, and no generator is lost."""
    runner = patched(fails=True)
    with pytest.raises(ValueError, match="no tokens"):
        runner.sample_tokens("g")
    assert runner.input_batch.generators == {0: "a", 1: "b"}
