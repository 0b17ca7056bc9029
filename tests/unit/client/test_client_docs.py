"""docs/sdk.md does what it says."""

import re
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Client
from pdserve.client.testing import FakeProxy

PAGE = Path(__file__).parents[3] / "docs" / "sdk.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:50050"


def test_every_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each by itself, as a reader would paste it, against a proxy at the address that it names."""
    assert len(EXAMPLES) > 8, "the page has lost its examples, or this test no longer finds them"
    with FakeProxy() as proxy:
        for number, example in enumerate(EXAMPLES, 1):
            code = compile(example.replace(ADDRESS, proxy.target), f"{PAGE}: example {number}", "exec")
            exec(code, {})
    assert "ok" in capsys.readouterr().out


def test_every_call_has_an_example() -> None:
    """Each public method of both clients is called on the page."""
    text = "\n".join(EXAMPLES)
    for kind in (Client, AsyncClient):
        for name, member in vars(kind).items():
            if callable(member) and not name.startswith("_") and name not in ("close", "aclose"):
                assert f"client.{name}(" in text, f"{kind.__name__}.{name}"
