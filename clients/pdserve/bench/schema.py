"""The JSON schema of the results, made from the dataclasses and the lines under their fields.

python -m pdserve.bench.schema > clients/pdserve/bench/results.schema.json
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from pdserve.bench import results, slo


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of `Results`. Members that are not in it are allowed: newer versions may have more."""
    made = msgspec.json.schema(results.Results)
    told = _told(results.__file__) | _told(slo.__file__)
    for name, definition in made["$defs"].items():
        for field, property_ in definition.get("properties", {}).items():
            if words := told.get((name, field)):
                property_["description"] = words
    made["$defs"]["Results"]["properties"]["schema"]["const"] = results.SCHEMA
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": results.SCHEMA} | made


def text() -> str:
    """As it is kept beside the classes."""
    return json.dumps(schema(), indent=1) + "\n"


def _told(file: str) -> dict[tuple[str, str], str]:
    """The line under each field, by class and field."""
    found = {}
    for node in ast.parse(Path(file).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=words)):
                    found[node.name, name] = " ".join(str(words).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(text())
