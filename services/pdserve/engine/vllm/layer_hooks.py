"""Whether vLLM calls the connector in each attention layer; off in a step that announces no layer.

vLLM asks `kv_transfer_state` before and after every layer of every step. Its way around the
connector, also for the steps of its own that have nothing to hand over, is to leave no connector in
that module while the layers run: the calls themselves then fall away, not only what they lead to.
Only the layers may see it so, hence `on` comes before vLLM looks for its connector again.
"""

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state as _state


class LayerHooks:
    """One per worker; used by the thread that runs the steps."""

    def __init__(self) -> None:
        self._set_aside: Any = None

    def off(self) -> None:
        """The layers from here on call nobody."""
        if self._set_aside is None:
            self._set_aside, _state._KV_CONNECTOR_AGENT = _state._KV_CONNECTOR_AGENT, None

    def on(self) -> None:
        """vLLM has its connector again; safe twice, and without an `off` before."""
        if self._set_aside is not None:
            _state._KV_CONNECTOR_AGENT, self._set_aside = self._set_aside, None
