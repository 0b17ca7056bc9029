"""The connector that vLLM loads: every method hands its words to one of the two sides.

vLLM makes one in EngineCore (scheduler role) and one in each worker (worker role); each has the
side of its role only.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as v1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from pdserve.engine.handoff.scheduler import StepPlan
from pdserve.engine.vllm import news, versions
from pdserve.engine.vllm.layer_hooks import LayerHooks
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.engine.vllm.process import belong_to_parent
from pdserve.engine.vllm.scheduler_side import IDLE, SchedulerSide, attach
from pdserve.engine.vllm.startup import StartReport
from pdserve.engine.vllm.worker_side import WorkerSide
from pdserve.rpc.errors import ConfigError, EngineDied
from pdserve.runtime.clock import Clock

# vllm is not typed here, so each of its classes is Any to the type checker.


@dataclass(frozen=True)
class StepMetadata(v1.KVConnectorMetadata):  # type: ignore[misc]  # see above
    """What goes from the scheduler to the workers in each step."""

    plan: StepPlan
    failed_blocks: tuple[int, ...] = ()
    idle: bool = False
    """The engine hands nothing over and has heard nothing."""


_IDLE = StepMetadata(IDLE.plan, idle=True)
"""That of IDLE."""


@dataclass(frozen=True)
class RankIdentity(v1.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # see above
    """What goes from a worker to the scheduler at start."""

    identity: Mapping[str, str]


class NewsStats(KVConnectorStats):  # type: ignore[misc]  # see above
    """News of consumers, on their way to the service."""

    def is_empty(self) -> bool:
        """See the base class."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Only the scheduler has news, so there is nothing to join."""
        return other if self.is_empty() else self

    def reset(self) -> None:
        """See the base class."""
        self.data: dict[str, Any] = {}

    def reduce(self) -> dict[str, int | float]:
        """Nothing for vLLM's log."""
        return {}


class KvdConnector(versions.ConnectorBase):
    """See the module. vLLM's base class says when each method is called."""

    def __init__(self, vllm_config: Any, role: v1.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = ConnectorOptions.decode(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._report = StartReport(self._options.report)
        self._config = vllm_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._step = _IDLE
        """Worker: what the step that runs is about."""
        self._layer_hooks = LayerHooks()
        with self._report.errors(role.name.lower()):
            belong_to_parent()
            groups = kv_cache_config.kv_cache_groups
            if len(groups) != 1:
                raise ConfigError(f"the model has {len(groups)} groups of KV layers; pdserve hands over one group")
            self._block_size: int = groups[0].kv_cache_spec.block_size
            if role is v1.KVConnectorRole.WORKER:
                rank = get_tensor_model_parallel_rank()
                self._worker = WorkerSide(self._options, rank, kv_cache_config.num_blocks, self._block_size)

    # Start.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Worker: vLLM allocates its KV inside; None: as it would without a connector."""
        return self._of_worker().memory.allocating()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Worker: the KV tensors are there."""
        with self._report.errors("worker"):
            self._of_worker().register(kv_caches, self._config)

    def get_handshake_metadata(self) -> RankIdentity:
        """Worker: for the scheduler."""
        return RankIdentity(self._of_worker().identity)

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankIdentity]) -> None:
        """Scheduler: all ranks are up.

        Raises:
            ConfigError: their KV layouts differ.
            KvdUnavailable: no kvd in time.
        """
        with self._report.errors("scheduler"):
            identities = [metadata[rank].identity for rank in sorted(metadata)]
            if any(other != identities[0] for other in identities):
                raise ConfigError(f"the ranks' KV layouts differ: {identities}")
            self._scheduler = SchedulerSide(attach(self._options, identities[0]), self._block_size, Clock())

    # Scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of the prompt comes from the peer."""
        return self._of_scheduler().matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        if request.kv_transfer_params is not None:
            self._of_scheduler().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Closes a round of scheduling."""
        done = self._of_scheduler().round(scheduler_output)
        return _IDLE if done is IDLE else StepMetadata(done.plan, done.failed_blocks)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; True keeps its blocks."""
        by_length = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        return self._of_scheduler().finished(request, block_ids, by_length)

    def get_kv_connector_stats(self) -> NewsStats | None:
        """Scheduler: news for the service; vLLM asks the workers too, which have none."""
        taken = self._scheduler.take_news() if self._scheduler is not None else []
        return NewsStats(news.encode(taken)) if taken else None

    # Worker.

    # vLLM calls all of these in every step, and most steps of a decoding engine hand nothing over.

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Before anything of the step is written."""
        if kv_connector_metadata.plan.fences:
            self._of_worker().fence(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Before the first layer."""
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata
        if not connector_metadata.idle:
            self._of_worker().begin_step(connector_metadata.plan)
        if not connector_metadata.plan.chunks:
            self._layer_hooks.off()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: kvd loads by itself."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM schedules a request when all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of the step is in memory. Not called in steps without chunks (`LayerHooks`)."""
        self._of_worker().layer_done(layer_name)

    def wait_for_save(self) -> None:
        """All layers of the step are."""
        self._layer_hooks.on()
        if self._step.plan.chunks:
            self._of_worker().end_step()

    def completed(self) -> versions.Completed:
        """See versions.ConnectorBase."""
        self._layer_hooks.on()  # with a draft model vLLM waits for the save after this
        if self._step.idle:
            return versions.NOTHING
        done = self._of_worker().poll()
        return versions.Completed(tuple(done.sent), tuple(done.received), tuple(done.failed), self._step.failed_blocks)

    # Both.

    def shutdown(self) -> None:
        """The process ends."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A whole-step graph would replay without telling of its layers."""
        return True

    def _of_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise EngineDied("vLLM used its scheduler's connector before the ranks were up")
        return self._scheduler

    def _of_worker(self) -> WorkerSide:
        if self._worker is None:
            raise EngineDied("vLLM used its scheduler's connector as a worker's")
        return self._worker
