#!/usr/bin/env bash
# Resolves what goes into the images into node.lock and bench.lock, with hashes, to the versions of requirements/dev.lock.
# Needs `uv`.
set -euo pipefail
cd "$(dirname "$0")/../.."
for lock in node bench; do
  extras=(--extra node)
  [ "$lock" = node ] || extras+=(--extra bench)
  uv pip compile pyproject.toml "${extras[@]}" --constraint requirements/dev.lock \
    --override deploy/compose/overrides.txt --python-version 3.11 \
    --generate-hashes --no-header --no-annotate --no-emit-find-links --no-emit-index-url \
    --output-file "deploy/compose/$lock.lock" "$@"
done
