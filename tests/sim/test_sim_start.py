"""Services that must not start: the real command ends before it serves, with status 2 and the reason by name."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from pdserve.kvd.testing import running_kvd


async def start(argv: list[str], path: Path | None = None) -> tuple[int, str]:
    """Runs `pdserve-prefill` to its end: (status, what it wrote). `path`: searched first for distributions."""
    environ = dict(os.environ)
    if path is not None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environ.get("PYTHONPATH", "")]))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdserve.prefill",
        *argv,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 110)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.vllm
async def test_an_argument_that_pdserve_must_own(tmp_path: Path) -> None:
    """vLLM's own connector beside ours would be two: refused, whatever else is right."""
    connector = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    async with running_kvd() as kvd:
        ours = ["--engine", "vllm", "--model", str(tmp_path), "--kvd-socket", kvd.socket]
        status, said = await start([*ours, "--", "--kv-transfer-config", connector])
    assert status == 2, said
    assert "--kv-transfer-config is pdserve's" in said


@pytest.mark.vllm
async def test_a_vllm_that_is_not_in_the_list(tmp_path: Path) -> None:
    """An installation says that it is 0.25.1: refused, with the versions that this release drives."""
    installed = tmp_path / "vllm-0.25.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    async with running_kvd() as kvd:
        ours = ["--engine", "vllm", "--model", str(tmp_path), "--kvd-socket", kvd.socket]
        status, said = await start(ours, tmp_path)
    assert status == 2, said
    assert "0.25.1 is not supported" in said
    assert "0.26 and 0.32" in said


async def test_vllms_arguments_for_another_engine(tmp_path: Path) -> None:
    """What follows -- is vLLM's; the simulated engine does not swallow it."""
    status, said = await start(["--engine", "sim", "--kvd-socket", str(tmp_path / "s"), "--", "--max-model-len", "9"])
    assert status == 2, said
    assert "--max-model-len" in said
