"""What an attempt has to do, and what it asks of each of its legs. Pure."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.proxy.legs import DecodeOrder, PrefillOrder, Source
from pdserve.proxy.types import Mode, Sampling


@dataclass(frozen=True, slots=True)
class Brief:
    """The attempt's task, whichever engines it gets."""

    request_id: str
    transfer_id: bytes
    """Fresh for each attempt."""
    mode: Mode
    prompt: Sequence[int]
    sampling: Sampling
    traceparent: str
    deadline: float
    """Monotonic seconds."""
    grace: float
    release_timeout: float
    recompute: bool = False
    """See DecodeOrder."""

    def prefill_order(self, peer_locator: bytes) -> PrefillOrder:
        """For the prefill leg; the locator is that of decode's engine."""
        return PrefillOrder(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            mode=self.mode,
            prompt=self.prompt,
            sampling=prefill_sampling(self.sampling),
            peer_locator=peer_locator,
            consumers=self.sampling.n,
        )

    def decode_order(self, source: Source | None) -> DecodeOrder:
        """For the decode leg."""
        return DecodeOrder(self.request_id, self.prompt, self.sampling, source, self.recompute)


def prefill_sampling(sampling: Sampling) -> Sampling:
    """What shapes the first token, and one token of it: whether that token ends the answer is
    decided by decode, which has the real parameters."""
    return dataclasses.replace(
        sampling, max_tokens=1, min_tokens=0, stop=(), stop_token_ids=(), ignore_eos=True, n=1, logprobs=None
    )
