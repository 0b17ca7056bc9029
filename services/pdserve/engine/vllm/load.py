"""What vLLM's statistics say of the load, and the news that ride in them."""

from collections.abc import Callable
from typing import Any

import structlog

from pdserve.engine.port import Load
from pdserve.engine.vllm import news

log = structlog.get_logger(__name__)


class Gauge:
    """Fed by vLLM once a step; read at any time. One thread's (the loop's)."""

    def __init__(self, on_news: Callable[[news.News], None]) -> None:
        """`on_news` hears each item once, in order."""
        self.total_tokens = 0
        """KV tokens that the engine has room for; set once it is known."""
        self._on_news = on_news
        self._usage = 0.0
        self._running = 0
        self._waiting = 0
        self._steps = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
        """vLLM's StatLoggerBase.record."""
        if scheduler_stats is None:
            return
        self._steps += 1
        self._usage = scheduler_stats.kv_cache_usage
        self._running = scheduler_stats.num_running_reqs
        self._waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
        for item in news.decode(scheduler_stats.kv_connector_stats):
            self._on_news(item)

    def log_engine_initialized(self) -> None:
        """vLLM's StatLoggerBase; nothing to say."""

    def log(self) -> None:
        """vLLM's StatLoggerBase; nothing to say."""

    def record_sleep_state(self, *state: Any, **named: Any) -> None:
        """vLLM's StatLoggerBase; an engine with KV in kvd does not sleep."""

    def load(self) -> Load:
        """As of the last step."""
        free = round(self.total_tokens * (1.0 - self._usage))
        return Load(free, self.total_tokens, self._running, self._waiting, self._steps)
