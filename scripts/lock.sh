#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/dev.lock. Needs `uv`, and UV_FIND_LINKS where the CPU
# build of torch comes from a folder.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=()
[ -n "${UV_FIND_LINKS:-}" ] || torch=(--torch-backend cpu)
uv pip compile pyproject.toml --extra cpu --extra demo --extra plan --extra nixl --group dev --group gen \
  --override requirements/overrides.txt --python-version 3.11 "${torch[@]}" \
  --no-header --no-emit-find-links --no-emit-index-url --output-file requirements/dev.lock "$@"
