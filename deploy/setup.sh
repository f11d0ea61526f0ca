#!/usr/bin/env bash
# Makes a virtual environment with everything that `make run` and `make test` need on CPU (Linux, x86-64, Python 3.11).
set -euo pipefail

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

command -v "$PYTHON" >/dev/null || { echo "setup: $PYTHON not found; install Python 3.11 or run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "setup: $PYTHON is $("$PYTHON" --version), but the lock in requirements/cpu.txt is for Python 3.11" >&2; exit 1; }

"$PYTHON" -m venv "$VENV"
# The lock is complete. --no-deps leaves out torchvision, torchaudio, torchcodec and triton, which vLLM declares but
# text models on CPU never load. --no-compile, because pip would compile on one core only.
install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile "$@"; }

# The CPU build of torch is not on PyPI. Try the default index first, in case it mirrors the build, then PyTorch's.
install -r requirements/cpu-torch.txt ||
  install --index-url "$PYTORCH_CPU_INDEX" -r requirements/cpu-torch.txt
# Compiles in the background while the rest is being installed. Errors are ignored, because some packages contain files
# for other Python versions, which are never imported.
compile() { "$VENV/bin/python" -m compileall -qq "$@" "$VENV/lib" || true; }
compile & compiling=$!
install -r requirements/cpu.txt
install --no-build-isolation --editable .
wait "$compiling"
compile -j 0

# Only the code scorer needs bubblewrap, for its sandbox.
command -v bwrap >/dev/null || { [ "$(id -u)" = 0 ] && apt-get install -qq -y bubblewrap >/dev/null 2>&1; } ||
  echo "setup: the code scorer needs bubblewrap, which is missing; install it with: sudo apt-get install bubblewrap" >&2
