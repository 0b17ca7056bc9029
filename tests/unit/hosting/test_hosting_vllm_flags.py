"""What the command line says of a vLLM engine reaches it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdserve.engine.hosting import factory
from pdserve.engine.hosting.factory import EngineChoice, EngineConfig
from pdserve.engine.sim.config import SimConfig
from pdserve.engine.vllm.settings import VllmSettings


async def test_every_flag_of_a_vllm_engine_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag is accepted and forgotten: each field of the settings is what was asked for. vLLM itself is a fake."""
    started: list[VllmSettings] = []

    class Engine:
        @staticmethod
        async def start(settings: VllmSettings) -> None:
            started.append(settings)

    monkeypatch.setitem(sys.modules, "pdserve.engine.vllm.engine", SimpleNamespace(VllmEngine=Engine))
    config = EngineConfig(model="m", served_model_name="s", kvd_socket=Path("/run/kvd.sock"), kvd_seconds=3.5, cpus="0")
    await factory.build_engine(EngineChoice(config, SimConfig(), ("--block-size", "32")))
    assert started == [VllmSettings("m", "/run/kvd.sock", 3.5, "s", ("--block-size", "32"), (0,))]
