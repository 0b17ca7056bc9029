#!/usr/bin/env bash
# Resolves what goes into the images into node.lock, bench.lock, nixl.lock and vllm.lock, with hashes, to the versions of
# requirements/dev.lock. Needs `uv`, and UV_FIND_LINKS where the CPU build of torch comes from a folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
resolve() { # LOCK, then what is resolved
  local lock=$1
  shift
  uv pip compile "$@" --constraint requirements/dev.lock --python-version 3.11 \
    --generate-hashes --no-header --no-annotate --no-emit-find-links --no-emit-index-url \
    --output-file "deploy/compose/$lock.lock"
}
torch=()
[ -n "${UV_FIND_LINKS:-}" ] || torch=(--torch-backend cpu)
resolve node pyproject.toml --extra node --override deploy/compose/overrides.txt "$@"
resolve bench pyproject.toml --extra node --extra bench --override deploy/compose/overrides.txt "$@"
resolve nixl pyproject.toml --extra node --extra nixl --override deploy/compose/overrides.txt "$@"
resolve vllm pyproject.toml --extra cpu --override requirements/overrides.txt "${torch[@]}" "$@"
