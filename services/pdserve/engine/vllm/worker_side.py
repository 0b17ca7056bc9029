"""A rank's half of the connector inside vLLM's worker: owns the KV memory, its registration with
kvd and the notices of each step."""

from collections.abc import Mapping
from typing import Any, Final

from pdserve.engine.handoff.scheduler import StepPlan
from pdserve.engine.handoff.worker import Completed, WorkerHandoff
from pdserve.engine.vllm import identity, layout, versions
from pdserve.engine.vllm.division import divided
from pdserve.engine.vllm.heads import head_facts
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.engine.vllm.rank_memory import memory_of
from pdserve.engine.vllm.startup import RankFacts, StartReport
from pdserve.kvd.client import Attachment, Hello, Participant, Rank
from pdserve.kvd.reshard import described
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError, EngineDied, InvalidRequest

ATTACH_TIMEOUT_S: Final = 15.0
"""kvd maps the memory before it answers."""
DEVICE_TIMEOUT_S: Final = 65.0
"""The first memory of a device makes kvd start that device and compile its kernel: longer than kvd's client waits for
that (60 s)."""


class WorkerSide:
    """One per rank; called by the thread that runs the steps only."""

    def __init__(self, options: ConnectorOptions, rank: int, num_blocks: int, block_size: int) -> None:
        self._options = options
        self._rank_index = rank
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._kind = MemoryKind(options.memory)
        self.memory = memory_of(self._kind)
        self.identity: dict[str, str] = {}
        """The engine's whole identity; empty before `register`."""
        self._layers: dict[str, int] = {}
        self._rank: Rank | None = None
        self._link: Attachment | None = None
        self._handoff: WorkerHandoff | None = None

    def register(self, tensors: Mapping[str, Any], vllm_config: Any) -> None:
        """Gives the memory behind the layers' tensors to kvd.

        Raises:
            ConfigError: tensors that kvd cannot take, or a device that it does not see.
            KvdUnavailable: no kvd in time.
            PdserveError: kvd refused the hello or the memory.
        """
        options, shapes = self._options, self.memory.shapes(tensors)
        placed, names = layout.layout_of(shapes, self._num_blocks, self._block_size)
        placed = divided(placed, [shapes[name] for name in names], head_facts(vllm_config, names[0], self._rank_index))
        placed.check(self.memory.size)
        self._layers = {name: index for index, name in enumerate(names)}
        backend = versions.backend_name(vllm_config, names[0])
        order = layout.block_order(shapes[names[0]], self._num_blocks)
        self.identity = {**options.identity, **identity.rank_identity(backend, order, placed, options.ranks)}
        index = self._rank_index
        self._rank = Rank(options.engine_id, index, self.memory.give(placed))
        hello = Hello(options.engine_id, Participant.WORKER, self.identity, ranks=options.ranks, rank=index)
        self._link = Attachment(options.kvd_socket, hello, on_welcome=self._rank.welcomed)
        self._attach(self._link)
        notices = self.memory.marking(self._rank.notices)
        self._handoff = WorkerHandoff(self._link, notices, options.engine_id, index, len(names))
        words = described(placed, options.ranks)
        StartReport(options.report).facts(RankFacts(index, self._num_blocks, self._block_size, self.identity, words))

    def fence(self, plan: StepPlan) -> None:
        """See WorkerHandoff.fence."""
        if plan.fences:
            self._registered().fence(plan)

    def begin_step(self, plan: StepPlan) -> None:
        """See WorkerHandoff.begin_step."""
        if self._link is not None and self._link.ends_available.is_set():
            self._link.drain_ends()  # the plan says what is over; these are only the same ends again
        if not plan.empty:
            self._registered().begin_step(plan)

    def layer_done(self, name: str) -> None:
        """See WorkerHandoff.layer_done."""
        handoff = self._handoff
        if handoff is not None and handoff.announcing:
            handoff.layer_done(self._layers[name])

    def end_step(self) -> None:
        """See WorkerHandoff.end_step."""
        if self._handoff is not None:
            self._handoff.end_step()

    def poll(self) -> Completed:
        """See WorkerHandoff.poll."""
        return self._handoff.poll() if self._handoff is not None else Completed()

    def close(self) -> None:
        """Tells kvd that the rank has ended; safe twice."""
        if self._link is not None:
            self._link.close()
        if self._rank is not None:
            self._rank.close()
        self.memory.close()

    def _attach(self, link: Attachment) -> None:
        if self._kind is MemoryKind.HOST:
            link.start(ATTACH_TIMEOUT_S)
            return
        try:
            link.start(DEVICE_TIMEOUT_S)
        except InvalidRequest as error:
            raise ConfigError(
                f"the kvd at {self._options.kvd_socket} does not take this rank's {self._kind.value} memory: "
                f"{error.message}"
            ) from error

    def _registered(self) -> WorkerHandoff:
        if self._handoff is None:
            raise EngineDied("vLLM ran a step before it registered its KV memory")
        return self._handoff
