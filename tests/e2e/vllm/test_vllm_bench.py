"""The engine's benchmark on a model so small that it says nothing about speed."""

import asyncio
import json
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

SMALL = {"layers": 2, "hidden": 64, "starts": 1, "streams": 2, "steps": 40, "rounds": 1, "transfers": 3}


async def test_both_parts_are_measured_and_nothing_else_is_printed() -> None:
    """Three prompts land on a real engine; a missed target is no failure without --strict."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pdserve.engine.vllm.bench", "--json"),
        *(f"--{name}={value}" for name, value in SMALL.items()),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(200):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    idle, landing = (json.loads(one) for one in out.decode().splitlines())
    assert (idle["name"], idle["unit"]) == ("idle connector", "% of a step")
    assert (landing["name"], landing["unit"]) == ("gap, 3 landing", "steps")
    assert "CPU time" in idle["detail"]
    assert landing["value"] > 0
    assert "MiB each" in landing["detail"]
    assert "0.0 MiB" not in landing["detail"]
