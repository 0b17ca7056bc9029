"""Takes a running engine's connector away and gives it back in turns, and writes down what the steps took.

Two processes of one program differ by some percent for all their life, by more than a connector may
cost. So both sides are measured in one process, inside vLLM's core, where the step is. Detached, the
core holds no connector in any of the places that vLLM asks: it then takes the very branches, in its
scheduler, its runner, its layers and its statistics, that an engine without one takes.
"""

import time
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.engine.vllm.bench_gaps import Block, Pattern

_FILE: Final = "blocks.jsonl"


def install(folder: str) -> None:
    """Engines that this process starts from here on run in turns and write their blocks to `folder`.
    Give it to `EngineProcess.start`: an engine is one or the other for its life."""
    from vllm.distributed.kv_transfer import kv_transfer_state as layers
    from vllm.v1.core.sched import scheduler as vllm

    class Scheduler(vllm.Scheduler):  # type: ignore[misc]  # vllm is not typed here
        """vLLM's own, which looks at the clocks when a step begins."""

        _pattern = Pattern()
        _aside: tuple[Any, Any, Any] | None = None

        def schedule(self, *args: Any, **named: Any) -> Any:
            """See the base class; a step lasts from one call to the next."""
            ended = self._pattern.end(time.perf_counter(), time.thread_time())
            if ended is not None:
                with Path(folder, _FILE).open("ab") as file:
                    file.write(msgspec.json.encode(ended) + b"\n")
            decoding = len(self.running) == 1 and not self.waiting and self.running[0].num_output_tokens > 0
            self._attach(self._pattern.attached_next(decoding))
            self._pattern.begin(time.perf_counter(), time.thread_time())
            return super().schedule(*args, **named)

        def _attach(self, wanted: bool) -> None:
            if wanted and self._aside is not None:
                self.connector, self.connector_prefix_cache_stats, layers._KV_CONNECTOR_AGENT = self._aside
                self._aside = None
            elif not wanted and self._aside is None:
                self._aside = (self.connector, self.connector_prefix_cache_stats, layers._KV_CONNECTOR_AGENT)
                self.connector = self.connector_prefix_cache_stats = layers._KV_CONNECTOR_AGENT = None

    vllm.Scheduler = Scheduler


def read(folder: str) -> list[Block]:
    """The blocks that an engine wrote; none where it never decoded long enough."""
    path = Path(folder, _FILE)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Block) for line in lines]
