#!/bin/sh
# Makes /opt/pdserve inside an image's build stages, from /wheels alone where that has wheels.
# usage: install.sh locked LOCK     an environment with what a lock pins
#        install.sh own             pdserve itself into it, and the bill of materials
set -eu
packages() { echo /opt/pdserve/lib/python3*/site-packages; }
pip() { /tmp/tools/bin/python -m pip --disable-pip-version-check --no-cache-dir "$@"; }
# Byte code that does not look at times: the file system is read-only, and two builds give the same bytes.
# torch carries files in the syntax of a later Python, which this one cannot compile.
compile() { /opt/pdserve/bin/python -m compileall -q -j 0 -x '/py31[2-9]_' --invalidation-mode unchecked-hash "$@"; }
into="--python /opt/pdserve/bin/python"

case $1 in
  locked)
    python3 -m venv /tmp/tools
    python3 -m venv --without-pip /opt/pdserve
    offline=
    if ls /wheels/locked/*.whl >/dev/null 2>&1; then
      offline="--no-index --find-links /wheels/locked"
    fi
    # shellcheck disable=SC2086  # options, split on purpose
    pip $into install --quiet $offline --require-hashes --no-deps --no-compile --only-binary :all: \
      -r "/source/deploy/$2"
    # What a library is tested, typed and compiled against with is ballast: a third of numpy. nixl's wheel also has
    # another program, for expert parallelism on GPUs: half of it.
    find "$(packages)" -type d \( -name tests -o -path '*/numpy/f2py' -o -path '*/numpy/distutils' \
      -o -path '*/numpy/_core/include' -o -name 'nixl_ep_*' \) -prune -exec rm -rf {} +
    find "$(packages)" -type f \( -name '*.pyi' -o -name '*.a' \) -delete
    compile "$(packages)"
    ;;
  own)
    if ! ls /wheels/own/pdserve-*.whl >/dev/null 2>&1; then
      # The compiler makes kvd's copy loop; without it kvd copies from Python, at half the speed.
      apt-get update -qq
      apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null
      pip wheel --quiet --no-deps --wheel-dir /wheels/own /source
    fi
    # shellcheck disable=SC2086
    pip $into install --quiet --no-index --no-deps --no-compile /wheels/own/pdserve-*.whl
    compile "$(packages)/pdserve"
    /opt/pdserve/bin/python /source/deploy/sbom.py >/opt/pdserve/sbom.cdx.json
    ;;
  *)
    echo "install.sh: locked or own, not $1" >&2
    exit 2
    ;;
esac
