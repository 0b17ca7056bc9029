"""The words about a number that is out of its bounds."""

import pytest

from pdserve.proxy.types import Ask, Sampling
from pdserve.proxy.validate import Bounds, check_ask
from pdserve.rpc.errors import InvalidRequest


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (Sampling(max_tokens=100_000_000_000), "max_tokens must be from 1 to 4294967295, not 100000000000"),
        (Sampling(max_tokens=0), "max_tokens must be from 1 to 4294967295, not 0"),
        (Sampling(max_tokens=10**400), "max_tokens must be from 1 to 4294967295, not a number of more than 64 bits"),
        (Sampling(min_tokens=1 << 32), "min_tokens must be from 0 to 4294967295, not 4294967296"),
        (Sampling(top_k=1 << 32), "top_k must be from 0 to 4294967295, not 4294967296"),
        (Sampling(temperature=2.5), "temperature must be at least 0 and at most 2, not 2.5"),
    ],
)
def test_both_bounds_are_named_and_the_number_as_it_was_given(sampling: Sampling, says: str) -> None:
    """A number too large is not told that it must be at least 1, and an integer is not rounded."""
    with pytest.raises(InvalidRequest) as caught:
        check_ask(Ask(prompt="x", sampling=sampling), Bounds())
    assert caught.value.message == says
