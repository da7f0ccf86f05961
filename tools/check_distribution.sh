#!/usr/bin/env bash
# Build wheel and sdist from a clean clone of what is committed, and try both as a stranger would:
# the metadata is right, the wheel installs and has its types, and the sdist's tests run.
#
#   bash tools/check_distribution.sh              # a quick selection of tests
#   bash tools/check_distribution.sh tests        # all of them
#   PYTHON=python3.12 bash tools/check_distribution.sh
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_QUIET=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

python="${PYTHON:-python3.11}"
tests=("$@")
if [[ $# -eq 0 ]]; then
    tests=(tests/test_layers.py tests/test_import.py tests/test_peers.py tests/memory)
fi
step() { printf '\n== %s\n' "$*"; }

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

step "a clean clone"
git clone -q --no-hardlinks . "$work/clone"
cd "$work/clone"

step "wheel and sdist"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install build twine
"$work/tools/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }
ls "$work/dist"
"$work/tools/bin/twine" check --strict "$work"/dist/*
[[ -z "$(git status --porcelain)" ]] || { echo "the build left files that git does not ignore" >&2; exit 1; }

step "what is in the wheel"
"$work/tools/bin/python" - "$work"/dist/*.whl <<'PYTHON'
import sys, zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
top = {name.split("/")[0] for name in names}
assert "pp_offload/py.typed" in names, "py.typed is missing: type checkers would ignore all types"
assert {one for one in top if not one.endswith(".dist-info")} == {"pp_offload"}, top
print(f"{len(names)} files, py.typed among them")
PYTHON

step "the sdist's tests, in a new virtual environment with the wheel"
tar xzf "$work"/dist/*.tar.gz -C "$work"
cd "$work"/pp_offload-*/
"$python" -m venv "$work/venv"
wheel=("$work"/dist/*.whl)
"$work/venv/bin/pip" install -c constraints.txt "${wheel[0]}[test]"
"$work/venv/bin/python" -m pytest -n 2 "${tests[@]}"
(cd / && "$work/venv/bin/python" -c "import pp_offload; print(pp_offload.__version__, pp_offload.attach.__module__, pp_offload.__file__)")
