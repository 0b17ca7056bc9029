"""vLLM's arguments out of a YAML file, by vLLM's own parser, in a process of its own. No engine is started."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.vllm.settings import parse
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.rpc.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]  # vLLM is imported, if this is the first test that needs it

GOOD = "max-model-len: 4096\nblock-size: 32\nenforce-eager: true\n"
FILES = {
    "good.yaml": GOOD,
    "stages.yaml": "pipeline-parallel-size: 2\n",
    "connector.yaml": "kv-transfer-config: {kv_role: kv_both}\n",
    "another.toml": "max-model-len = 4096\n",
    "broken.yaml": "a: [\n",
    "list.yaml": "- a\n",
    "unknown.yaml": "no-such-argument: 1\n",
    "empty.yaml": "",
}
OVER = ["--max-model-len", "512"]
CASES: dict[str, list[str]] = {
    **{name: ["--config", name] for name in (*FILES, "nowhere.yaml")},
    "by hand": ["--max-model-len", "4096", "--block-size", "32", "--enforce-eager"],
    "before": [*OVER, "--config", "good.yaml"],
    "behind": ["--config", "good.yaml", *OVER],
    "no file": ["--config"],
}


def tried(folder: Path, cases: Sequence[Sequence[str]]) -> list[dict[str, Any] | str]:
    """In the other process, whose working directory becomes `folder`."""
    os.chdir(folder)

    def one(args: Sequence[str]) -> dict[str, Any] | str:
        try:
            return parse(args)
        except ConfigError as error:
            return error.message

    return [one(args) for args in cases]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case: the arguments by name, or why they are refused."""
    folder: Path = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with EngineProcess.fork_server().Pool(1) as other:
        told = other.apply_async(tried, (folder, list(CASES.values()))).get(timeout=100)
        other.close()
        other.join()
    return dict(zip(CASES, told, strict=True))


def test_a_file_says_what_the_command_line_would(parsed: dict[str, Any]) -> None:
    """The same arguments come out; what is on the command line goes over the file, before it or behind."""
    assert parsed["good.yaml"] == parsed["by hand"] == {"max_model_len": 4096, "block_size": 32, "enforce_eager": True}
    assert parsed["before"] == parsed["behind"] == {"max_model_len": 512, "block_size": 32, "enforce_eager": True}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("stages.yaml", "--pipeline-parallel-size is not supported"),  # no way round what pdserve must own
        ("connector.yaml", "--kv-transfer-config is pdserve's"),
        ("another.toml", "vLLM's arguments: Config file must be of a yaml/yml type"),
        ("broken.yaml", "vLLM's arguments: "),
        ("list.yaml", "vLLM's arguments: "),
        ("unknown.yaml", "vLLM's arguments: unrecognized arguments: --no-such-argument"),
        ("empty.yaml", "vLLM's arguments: "),
        ("nowhere.yaml", "nowhere.yaml"),
        ("no file", "vLLM's arguments: No config file specified"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_wrong_setting(parsed: dict[str, Any], case: str, said: str) -> None:
    """By name, as on the command line; never a crash."""
    assert isinstance(parsed[case], str), parsed[case]
    assert said in parsed[case]
