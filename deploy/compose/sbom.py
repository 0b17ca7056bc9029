"""Prints what an environment holds as CycloneDX 1.5 JSON: every distribution with its version and licence."""

import importlib.metadata
import json
import sys


def component(dist: importlib.metadata.Distribution) -> dict[str, object]:
    """One distribution."""
    name, version = dist.metadata["Name"], dist.version
    found: dict[str, object] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
    }
    said = dist.metadata.get("License-Expression") or dist.metadata.get("License") or ""
    if said and "\n" not in said:  # some put the whole text there
        found["licenses"] = [{"license": {"name": said}}]
    return found


def main() -> int:
    """Exit status."""
    components = sorted((component(dist) for dist in importlib.metadata.distributions()), key=lambda c: str(c["name"]))
    document = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}
    json.dump(document, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
