"""docs/field-failures.md says only what is there: each test that it names exists, each selection selects something."""

import ast
import re
from pathlib import Path

import pytest

from tests.matrix import cells

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "field-failures.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
SELECTED = re.compile(r"`tests/matrix -k ([^`]+)`")
MATRIX = [str(cell) for cell in cells.every() if not cells.cannot(cell)]


def rows(text: str) -> list[list[str]]:
    """The cells of both tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [columns for columns in split if columns[0].isdigit()]


def problems(text: str) -> list[str]:
    """What is wrong with a document, in words."""
    found = []
    tests: dict[str, set[str]] = {}
    for path, name in NAMED.findall(text):
        if path not in tests:
            there = (ROOT / path).is_file()
            tree = ast.parse((ROOT / path).read_text()) if there else ast.Module([], [])
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            tests[path] = {node.name for node in tree.body if isinstance(node, functions)}
        if name not in tests[path]:
            found.append(f"there is no {path}::{name}")
    for expression in SELECTED.findall(text):
        if not any(expression in cell for cell in MATRIX):
            found.append(f"-k {expression} selects nothing")
    for number, *columns in rows(text):
        if "https://" not in columns[0]:
            found.append(f"{number} does not say where it was reported")
        if len(columns) == 3 and not (NAMED.search(columns[2]) or SELECTED.search(columns[2])):
            found.append(f"{number} has no test")
        if len(columns) not in (2, 3) or not all(columns):
            found.append(f"{number} has {len(columns)} columns, or an empty one")
    numbers = [int(row[0]) for row in rows(text)]
    if sorted(numbers) != list(range(1, len(numbers) + 1)):
        found.append("the rows are not numbered one by one")
    return found


def test_every_test_that_is_named_exists() -> None:
    """And every row has one, and a link to its report."""
    text = DOCUMENT.read_text()
    assert len(rows(text)) >= 50
    assert not problems(text)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| 1 | [a](https://x) | b | `tests/unit/test_field_failures.py::test_nothing` |", "there is no tests/unit"),
        ("| 1 | [a](https://x) | b | `tests/unit/nowhere.py::test_nothing` |", "there is no tests/unit/nowhere"),
        ("| 1 | [a](https://x) | b | `tests/matrix -k nonsense:` |", "selects nothing"),
        ("| 1 | [a](https://x) | b | nothing |", "1 has no test"),
        ("| 1 | a | b | `tests/matrix -k P-killed:` |", "does not say where"),
        ("| 2 | [a](https://x) | b | `tests/matrix -k P-killed:` |", "not numbered"),
        ("| 1 | [a](https://x) | | `tests/matrix -k P-killed:` |", "an empty one"),
    ],
)
def test_a_wrong_row_is_seen(row: str, problem: str) -> None:
    """The check can fail."""
    (found,) = problems(row)
    assert problem in found
