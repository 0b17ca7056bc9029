#!/bin/sh
# Makes /opt/pdserve inside a vendor image's build stage; see Dockerfile.vendor.
set -eu
python3 -m venv --without-pip /opt/pdserve
here=$(/opt/pdserve/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The image's packages, wherever its python3 has them (a venv of its own too), behind ours; and a list that pins each.
python3 - "$here" <<'END'
import importlib.metadata, pathlib, sys
here = pathlib.Path(sys.argv[1])
theirs = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and pathlib.Path(path).is_dir()]
(here / "vendor.pth").write_text("".join(f"{path}\n" for path in theirs))
found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
pathlib.Path("/tmp/theirs.txt").write_text("".join(f"{name}=={version}\n" for name, version in sorted(found.items())))
END

pip() { python3 -m pip --python /opt/pdserve/bin/python --disable-pip-version-check --no-cache-dir "$@"; }
offline=
if ls /wheels/locked/*.whl >/dev/null 2>&1; then
  offline="--no-index --find-links /wheels/locked"
fi
if ls /wheels/own/pdserve-*.whl >/dev/null 2>&1; then
  wheel=$(ls /wheels/own/pdserve-*.whl)
else
  pip wheel --quiet --no-deps --wheel-dir /tmp/built /source
  wheel=$(ls /tmp/built/pdserve-*.whl)
fi
# shellcheck disable=SC2086  # options, split on purpose
pip install --quiet $offline --constraint /tmp/theirs.txt --no-compile --only-binary :all: "$wheel[node]"

# What is there twice would hide the vendor's.
/opt/pdserve/bin/python - "$here" <<'END'
import importlib.metadata, pathlib, sys
def names(paths):
    return {dist.metadata["Name"].lower().replace("_", "-") for dist in importlib.metadata.distributions(path=paths)}
ours = names([sys.argv[1]])
twice = ours & names(pathlib.Path(sys.argv[1], "vendor.pth").read_text().split())
if twice:
    sys.exit(f"these would hide the image's own: {', '.join(sorted(twice))}")
print(f"added beside the image's packages: {', '.join(sorted(ours))}")
END
find /opt/pdserve/lib -type d \( -name tests -o -name f2py -o -path '*/numpy/_core/include' \) -prune -exec rm -rf {} +
find /opt/pdserve/lib -type f \( -name '*.pyi' -o -name '*.a' \) -delete
/opt/pdserve/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/pdserve/lib
/opt/pdserve/bin/python /source/deploy/sbom.py >/opt/pdserve/sbom.cdx.json
