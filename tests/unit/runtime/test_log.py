"""The log is one JSON object a line, and holds nothing that users said."""

import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator

import pytest
import structlog

from pdserve.runtime import log
from pdserve.runtime.log import LogFormat, LogLevel


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Where the log goes; structlog is as before afterwards."""
    yield io.StringIO()
    structlog.reset_defaults()


def test_events_are_json_with_readable_ids(lines: io.StringIO) -> None:
    """Level, service, time and hexadecimal ids are on every line."""
    log.setup("svc", LogFormat.JSON, LogLevel.INFO, lines)
    structlog.get_logger("x").info("took", transfer_id=b"\x01\xff", n=3)
    line = json.loads(lines.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "took", "level": "info", "service": "svc", "transfer_id": "01ff", "n": 3}


def test_prompts_are_withheld(lines: io.StringIO) -> None:
    """Whatever a call site passes, text and tokens of users stay out."""
    log.setup("svc", LogFormat.JSON, LogLevel.INFO, lines)
    structlog.get_logger("x").info("took", prompt="my secret", token_ids=[7], text="also secret")
    assert "secret" not in lines.getvalue()
    assert "7" not in json.loads(lines.getvalue())["token_ids"]


def test_the_level_is_kept(lines: io.StringIO) -> None:
    """Less severe events are not written."""
    log.setup("svc", LogFormat.JSON, LogLevel.WARNING, lines)
    structlog.get_logger("x").info("quiet")
    structlog.get_logger("x").warning("loud")
    assert [json.loads(line)["event"] for line in lines.getvalue().splitlines()] == ["loud"]


def test_a_file_gets_json_and_tracebacks(lines: io.StringIO) -> None:
    """AUTO on what is no terminal is JSON, with an exception as one field."""
    log.setup("svc", LogFormat.AUTO, LogLevel.INFO, lines)
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger("x").error("failed", exc_info=error)
    assert "ValueError: broken" in json.loads(lines.getvalue())["exception"]


async def test_a_log_that_nobody_reads_any_more() -> None:
    """A process whose log's reader has gone goes on: a line that cannot be written is no error of what wrote it."""
    said = (
        "from pdserve.runtime import log\n"
        "import structlog\n"
        "log.setup('deaf')\n"
        "input()\n"
        "for _ in range(3):\n"
        "    structlog.get_logger().warning('nobody hears it')\n"
        "print('went on', flush=True)\n"
    )
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", said, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=writer
    )
    os.close(writer)
    os.close(reader)  # gone before the first line
    out, _ = await asyncio.wait_for(process.communicate(b"\n"), 30)
    assert out == b"went on\n"
