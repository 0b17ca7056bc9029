"""What the connector does in a step that hands nothing over: counts, no clock.

vLLM's own bracket around a step and its own wrapper around a layer are real; the forward pass, kvd's
links and the notices' way out are fakes.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.handoff.scheduler import StepPlan
from pdserve.engine.handoff.worker import WorkerHandoff
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.engine.vllm.scheduler_side import SchedulerSide
from pdserve.kvd.client import End, Outcome, Request
from pdserve.kvd.notices import Chunk, LayerReady, Notice

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

LAYERS = ("layer.0", "layer.1", "layer.2")
DECODING = SimpleNamespace(total_num_scheduled_tokens=1, preempted_req_ids=set())


class Link:
    """Counts who asks for ends."""

    def __init__(self) -> None:
        self.ends_available = threading.Event()
        self.ends: list[End] = []
        self.drained = 0

    def send(self, message: Request) -> None:
        raise AssertionError(f"an idle connector sent {message}")

    def drain_ends(self) -> Sequence[End]:
        self.drained += 1
        self.ends_available.clear()
        ends, self.ends = self.ends, []
        return ends

    def end(self) -> None:
        self.ends.append(End("old", bytes(16), Outcome.RELEASED))
        self.ends_available.set()

    def close(self) -> None:
        raise AssertionError("nobody closes")


class Notices:
    """Takes everything."""

    def __init__(self) -> None:
        self.sent: list[Notice] = []

    def send(self, notice: Notice) -> bool:
        self.sent.append(notice)
        return True


class Engine:
    """One connector in both roles, driven as vLLM drives them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.model_executor.layers.attention import attention
        from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
        from vllm.v1.worker import kv_connector_model_runner_mixin as runner

        from pdserve.engine.vllm import connector
        from pdserve.engine.vllm.layer_hooks import LayerHooks
        from pdserve.engine.vllm.worker_side import WorkerSide

        self.scheduler_link, self.worker_link, self.notices = Link(), Link(), Notices()
        self.scheduler = SchedulerSide(self.scheduler_link, 32, SimpleNamespace(monotonic_ns=lambda: 7))
        worker = WorkerSide(ConnectorOptions("engine", "", 1, {}, ""), 0, 8, 32)
        # As after `register`, which needs vLLM's tensors.
        worker._layers = {name: index for index, name in enumerate(LAYERS)}
        worker._link = self.worker_link  # type: ignore[assignment]  # a fake
        worker._handoff = WorkerHandoff(None, self.notices, "engine", 0, len(LAYERS))
        monkeypatch.setattr(connector.KvdConnector, "__init__", lambda self: None)
        made = connector.KvdConnector()  # type: ignore[call-arg]  # without vLLM's configuration
        made._scheduler, made._worker = self.scheduler, worker
        made._step, made._layer_hooks = connector._IDLE, LayerHooks()
        made._connector_metadata = None
        self.connector: Any = made
        self.metadata = connector.StepMetadata
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
        monkeypatch.setattr(attention, "get_attention_context", lambda name: (object(), None, None, None))
        monkeypatch.setattr(runner, "get_forward_context", lambda: None)
        self._bracket = runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
        self.visible = kv_transfer_state.has_kv_transfer_group
        self.attend: Callable[[str], None] = maybe_transfer_kv_layer(_attend)

    def plan(self) -> Any:
        """A round of scheduling."""
        return self.connector.build_connector_meta(DECODING)

    def run(self, metadata: Any, layers: int = len(LAYERS)) -> Any:
        """A step's forward pass over the first layers; what the worker reports."""
        step = SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=False, finished_req_ids=set())
        self.connector.handle_preemptions(metadata)
        with self._bracket(step) as output:
            for index in range(layers):
                self.attend(LAYERS[index])
        return output


def _attend(layer_name: str) -> None:
    """A layer's attention."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """See Engine."""
    return Engine(monkeypatch)


def calls(work: Callable[[], object]) -> int:
    """Functions called by `work`, Python's and C's."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_an_idle_step_says_and_asks_nothing(engine: Engine) -> None:
    """The scheduler makes nothing: every idle step has the same metadata. Neither half looks for ends
    that have not come, waits, or tells kvd anything."""
    first, second = engine.plan(), engine.plan()
    assert first is second
    output = engine.run(first)
    assert output.is_empty()
    assert (engine.scheduler_link.drained, engine.worker_link.drained) == (0, 0)
    assert engine.notices.sent == []


def test_an_idle_step_costs_no_call_a_layer(engine: Engine) -> None:
    """A layer more is vLLM's own two calls more, its wrapper and its question for a connector, and
    none of the connector's; then the attention itself."""
    idle = engine.plan()
    engine.run(idle)
    one, three = (calls(lambda count=count: engine.run(idle, count)) for count in (1, 3))  # type: ignore[misc]
    assert (three - one) / 2 == 3


def test_vllm_has_its_connector_again_after_the_layers(engine: Engine) -> None:
    """Also where the forward pass fails: whatever vLLM does next, it finds the connector."""
    seen: list[bool] = []

    def fail(layer_name: str) -> None:
        seen.append(engine.visible())
        raise RuntimeError("no")

    engine.attend = fail
    with pytest.raises(RuntimeError):
        engine.run(engine.plan())
    assert seen == [False]
    assert engine.visible()


def test_a_step_with_chunks_is_told_layer_by_layer(engine: Engine) -> None:
    """An idle step before and after it does not silence it."""
    pushing = engine.metadata(StepPlan(5, (Chunk("p", 0, 0, (3,), 1),)))
    for metadata in (engine.plan(), pushing, engine.plan()):
        engine.run(metadata)
    told = [notice for notice in engine.notices.sent if isinstance(notice, LayerReady)]
    assert [notice.layer for notice in told] == [0, 1, 2]
    assert len(engine.notices.sent) == 5


def test_an_end_that_comes_to_an_idle_engine_is_taken(engine: Engine) -> None:
    """In the next step, by both halves; the one after is idle again."""
    idle = engine.plan()
    engine.scheduler_link.end()
    engine.worker_link.end()
    metadata = engine.plan()
    assert metadata is not idle
    engine.run(metadata)
    assert (engine.scheduler_link.ends, engine.worker_link.ends) == ([], [])
    assert engine.plan() is idle


def test_an_end_reaches_vllm_in_the_step_that_names_it(engine: Engine) -> None:
    """And once."""
    output = engine.run(engine.metadata(StepPlan(5, received=("c",), failed=("c",)), (4,)))
    assert (output.finished_recving, output.failed_recving) == ({"c"}, {"c"})
    assert engine.run(engine.plan()).is_empty()
