#!/usr/bin/env bash
# Fills FOLDER/own with pdserve's wheel, compiled here, and FOLDER/locked with those of the locks: then an image is built
# without a network. usage: wheels.sh [FOLDER [--only-own | --vllm]]; PYTHON chooses the interpreter that has pip (3.11).
# --vllm: for LOCK=vllm, in a folder of its own; PIP_FIND_LINKS has the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-deploy/compose/wheels}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder/own" "$folder/locked"
rm -f "$folder"/own/*.whl # an older one would be installed too
# From a copy: the build compiles in place, and what runs from this tree may have the library open.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
tar c --exclude __pycache__ --exclude '*.so' pyproject.toml hatch_build.py README.md LICENSE protos kvd services clients |
  tar x -C "$copy"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder/own" "$copy"
locks=(node bench nixl)
case ${2:-} in
  --only-own) exit 0 ;;
  --vllm) locks=(vllm) ;;
esac
rm -f "$folder"/locked/*.whl
for lock in "${locks[@]}"; do
  "$python" -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
    --dest "$folder/locked" --requirement "deploy/compose/$lock.lock"
done
echo "wheels: $(ls "$folder"/locked/*.whl | wc -l) in $folder/locked, $(du -sh "$folder" | cut -f1)"
