#!/usr/bin/env bash
# Makes .venv from requirements/dev.lock, once: later calls return at once while nothing changed.
# PYTHON chooses the interpreter (3.11: the CPU build of vLLM has no other).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.ready
# What is compiled while installing, too: a changed copy.c is no longer that of the library beside it.
copy_loop=kvd/pdserve/kvd/transport
want=$(cat requirements/dev.lock pyproject.toml scripts/setup.sh hatch_build.py "$copy_loop/copy.c" | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

say() { echo "setup: $*"; }
uv_version=0.13.9

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
[ -n "$python" ] || { say "Python 3.11 is needed and was not found; set PYTHON=/path/to/python3.11"; exit 1; }

say "virtual environment with $("$python" --version 2>&1) in $venv"
# Also where one is there without pip, as some tools make them.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"

# The CPU build of torch: from the folder of wheels that pip knows of, else from PyTorch's own index.
links=$("$venv/bin/python" -m pip config list 2>/dev/null | sed -n "s/^[^=]*find-links='\(.*\)'$/\1/p" | head -n 1)
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$links}}
torch=()
if [ -n "$links" ]; then
  export UV_FIND_LINKS=$links
  say "torch from the wheel folder that pip is set to"
else
  torch=(--torch-backend cpu)
  say "torch from PyTorch's index of CPU wheels"
fi

say "installing $(grep -cE '^[a-z]' requirements/dev.lock) pinned packages (3.2 GB on disk, about a minute) and compiling byte code"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --compile-bytecode "${torch[@]}" -r requirements/dev.lock
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --editable .
[ -f "$copy_loop/libcopy.so" ] || say "no C compiler worked (CC, or cc): kvd will copy from Python, more slowly"
echo "$want" >"$stamp"
say "done"
