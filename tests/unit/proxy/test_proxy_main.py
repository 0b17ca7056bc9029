"""The command: flags, what it refuses, how it starts and ends."""

import asyncio
import os
import signal
import sys
from typing import Any

import pytest

from pdserve.proxy.__main__ import main, parser
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.types import Mode, OnFailure, Route
from pdserve.rpc.errors import ConfigError
from pdserve.runtime import flags


def test_flags_become_the_config() -> None:
    """Every setting is a flag; the deployment's defaults are among them."""
    args = parser().parse_args(
        ["--mode=write", "--route=split_or_colocated", "--on-failure=fail", "--admission-queue=7", "--tokenizer=m=/t"]
    )
    config = flags.from_args(ProxyConfig, args)
    assert (config.mode, config.route, config.on_failure) == (Mode.WRITE, Route.SPLIT_OR_COLOCATED, OnFailure.FAIL)
    assert (config.admission_queue, config.tokenizer_folders()) == (7, {"m": "/t"})
    assert flags.from_args(ProxyConfig, parser().parse_args([])) == ProxyConfig()


@pytest.mark.parametrize(
    "wrong",
    [
        {"grpc_port": 65536},
        {"admission_queue": 0},
        {"retries": -1},
        {"beats_settle": -1},
        {"beat_interval": float("nan")},
        {"tokenizer": ("x",)},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is bound, and by name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ProxyConfig(**wrong)


@pytest.mark.parametrize("argv", [["--host", "0.0.0.0"], ["--grpc-port", "-1"], ["--cluster-key-file", "/nowhere"]])
def test_the_command_says_why_it_does_not_start(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2; opening the network without a key is among the refusals."""
    monkeypatch.delenv("PDSERVE_CLUSTER_KEY_FILE", raising=False)
    assert main(argv) == 2


async def test_the_command_runs_and_drains() -> None:
    """A process of its own: logs its addresses, ends with status 0 at SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdserve.proxy",
        "--log-format",
        "json",
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"proxy_ready" not in (line := await process.stderr.readline()):
                assert line, "it ended before it was ready"
            assert b'"grpc": "127.0.0.1:' in line
            process.send_signal(signal.SIGTERM)
            await process.stderr.read()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
