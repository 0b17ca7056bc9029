"""What a server process writes to its log: structlog events on stderr, one a line, never a prompt."""

import contextlib
import enum
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

WITHHELD = frozenset({"prompt", "messages", "text", "token_ids", "prompt_token_ids", "content"})
"""Keys whose values are what users said, or what was answered."""


class LogFormat(enum.Enum):
    """How a line looks."""

    AUTO = "auto"
    """Console on a terminal, else JSON."""
    CONSOLE = "console"
    JSON = "json"


class LogLevel(enum.Enum):
    """Least severe event that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Log:
    """A stream whose reader may go: a line that cannot be written is lost, and neither a request nor a stop is."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, line: str) -> None:
        """Writes it, if anybody reads."""
        with contextlib.suppress(OSError):  # there is no other place to say so
            self._out.write(line)

    def flush(self) -> None:
        """The same."""
        with contextlib.suppress(OSError):
            self._out.flush()


def setup(
    service: str, form: LogFormat = LogFormat.AUTO, level: LogLevel = LogLevel.INFO, stream: TextIO | None = None
) -> None:
    """Configures structlog for this process; `stream` is stderr unless a test says otherwise."""
    out = sys.stderr if stream is None else stream
    as_json = form is LogFormat.JSON or (form is LogFormat.AUTO and not out.isatty())
    last: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr)]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _named(service),
            withhold,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.name)),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Log(out))),
        cache_logger_on_first_use=False,
    )


def about(**ids: str | bytes) -> None:
    """From now on every line of this task, and of tasks that it starts, says what it is about: request_id,
    trace_id, transfer_id. What it said before is forgotten; empty ids are left out."""
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**{name: value for name, value in ids.items() if value})


def withhold(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Takes out what must not be logged, and makes ids readable: bytes become hexadecimal."""
    for name, value in event.items():
        if name in WITHHELD:
            event[name] = "<withheld>"
        elif isinstance(value, bytes):
            event[name] = value.hex()
    return event


def _named(service: str) -> structlog.types.Processor:
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("service", service)
        return event

    return add
