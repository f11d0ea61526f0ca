#!/usr/bin/env bash
# Compiles the package for suffix decoding (rollout.speculation) into the virtual environment that deploy/setup.sh made.
set -euo pipefail

VENV=$(cd "${VENV:-.venv}" && pwd)
install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes "$@"; }

# Isolated, pip would download another torch with CUDA, 3 GB, which the build imports but does not compile against.
{ install -r requirements/suffix-build.txt &&
  PATH="$VENV/bin:$PATH" install --no-build-isolation -r requirements/suffix.txt; } || {
  echo "setup: arctic-inference is not installed, so suffix decoding is not tested; it needs g++ and Python's headers (python3.11-dev)" >&2
  exit 1; }
