"""Ready means that a text can be placed: engines alone are not enough, what makes it token ids has to be there."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pdserve.proxy.tokenizing.hf import HfTokenizer
from pdserve.proxy.tokenizing.plain import BytesTokenizer
from pdserve.proxy.tokenizing.shelf import Shelf
from pdserve.rpc.errors import ConfigError
from tests.unit.proxy.test_proxy_readiness import asking
from tests.unit.proxy.test_proxy_tokenizing import folder

__all__ = ["asking"]


async def not_ready(asked: Any) -> str:
    """What both faces say once no tokenizer is being loaded any more."""
    while "being loaded" in (said := str(await asked.says(False))):  # noqa: ASYNC110 - it is what a client sees
        await asyncio.sleep(0.002)
    return said


async def test_a_pair_without_a_tokenizer_is_not_ready(asking: Any, tmp_path: Path) -> None:
    """Both faces say why. Token ids are served all the same, a text is refused with the same words; with the folder
    there, the next engine that comes makes it ready."""
    asked = await asking()
    where = tmp_path / "model"
    await asked.deployment.engine("prefill", tokenizer=str(where))
    await asked.deployment.engine("decode", tokenizer=str(where))
    said = await not_ready(asked)
    why = f"no tokenizer.json in {where}; give token ids, or the proxy --tokenizer"
    assert said == f"UNAVAILABLE: no tokenizer for fake: {why}"
    status, body = await asked.post()
    assert (status, f"{body['error']['code']}: {body['error']['message']}") == (503, said)
    assert (await asked.post(prompt=[1, 2, 3]))[0] == 200
    where.mkdir()
    folder(where)
    await asked.deployment.engine("prefill", tokenizer=str(where))
    assert await asked.says(True) == "fake"
    assert (await asked.post(prompt="hello"))[0] == 200


async def test_a_proxy_is_ready_when_its_tokenizer_is_loaded(asking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, and then by itself, with no further word of an engine. A text that came meanwhile is answered."""
    loaded = threading.Event()

    def slow(_: Path) -> BytesTokenizer:
        assert loaded.wait(20.0)
        return BytesTokenizer()

    monkeypatch.setattr(HfTokenizer, "load", slow)
    asked = await asking(route="colocated")
    try:
        await asked.deployment.engine("both", tokenizer="/large")
        assert await asked.says(False) == "UNAVAILABLE: the tokenizer of fake is being loaded"
        early = asyncio.create_task(asked.post())
        loaded.set()
        assert await asked.says(True) == "fake"
        assert (await early)[0] == 200
    finally:
        loaded.set()


async def test_the_proxys_own_folder_counts(asking: Any, tmp_path: Path) -> None:
    """--tokenizer is what is loaded, whatever the engines announce."""
    asked = await asking(tokenizer=(f"fake={folder(tmp_path)}",), route="colocated")
    await asked.deployment.engine("both", tokenizer="/nowhere")
    assert await asked.says(True) == "fake"


async def test_one_model_with_a_tokenizer_is_enough(asking: Any) -> None:
    """It is the one that is listed; when its engine has left, what is left is not ready, and both reasons are said."""
    asked = await asking(route="colocated")
    await asked.deployment.engine("both", model="mute", tokenizer="/nowhere")
    speaks = await asked.deployment.engine("both", model="speaks")
    await asked.deployment.engine("prefill", model="half")
    assert await asked.says(True) == "speaks"
    await speaks.stop()
    said = await not_ready(asked)
    assert said.startswith("UNAVAILABLE: no tokenizer for mute: ")
    assert "; half: no colocated engine" in said


async def test_a_tokenizer_that_is_being_loaded_is_not_there_yet() -> None:
    """Nor one that nobody has announced, nor one whose loading went wrong in whatever way; each end of a loading is
    told, and what is there then is said."""
    go_on, changed = threading.Event(), asyncio.Event()
    fails: list[Exception] = [ConfigError("no file"), RuntimeError("a defect")]

    def load(_: str) -> BytesTokenizer:
        assert go_on.wait(10.0)
        go_on.clear()
        if fails:
            raise fails.pop(0)
        return BytesTokenizer()

    shelf = Shelf({}, load=load, changed=changed.set)
    try:
        assert shelf.lacking("m") == "no engine has announced a tokenizer for m"
        for said in ("no tokenizer for m: no file; ", "no tokenizer for m: RuntimeError('a defect'); ", ""):
            shelf.announce("m", "any")
            assert shelf.lacking("m") == "the tokenizer of m is being loaded"
            assert not changed.is_set()
            go_on.set()
            await asyncio.wait_for(changed.wait(), 10.0)
            changed.clear()
            assert shelf.lacking("m").startswith(said)
        assert shelf.lacking("m") == ""
    finally:
        go_on.set()
        shelf.close()
