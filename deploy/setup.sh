#!/usr/bin/env bash
# Makes a virtual environment with everything that `make run` and `make test` need on a CPU: Linux, x86-64, Python 3.11.
set -euo pipefail

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

command -v "$PYTHON" >/dev/null || { echo "setup: $PYTHON not found; install Python 3.11 or run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "setup: $PYTHON is $("$PYTHON" --version), but the lock in requirements/cpu.txt is for Python 3.11" >&2; exit 1; }

"$PYTHON" -m venv "$VENV"
# The lock is complete. --no-deps because torchvision, torchaudio, torchcodec and triton are left out on purpose:
# vLLM declares them, and text models on CPU never load them. --no-compile because pip would do that on one core.
install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile "$@"; }

# A CPU build of torch is not on PyPI; some sites mirror it, everybody else gets it from PyTorch's own index.
install -r requirements/cpu-torch.txt ||
  install --index-url "$PYTORCH_CPU_INDEX" -r requirements/cpu-torch.txt
# Some packages carry files that are not for this Python, which nobody imports. What is there is compiled meanwhile.
compile() { "$VENV/bin/python" -m compileall -qq "$@" "$VENV/lib" || true; }
compile & compiling=$!
install -r requirements/cpu.txt
install --no-build-isolation --editable .
wait "$compiling"
compile -j 0

# The sandbox of the code scorer; everything else works without it.
command -v bwrap >/dev/null || { [ "$(id -u)" = 0 ] && apt-get install -qq -y bubblewrap >/dev/null 2>&1; } ||
  echo "setup: the code scorer needs bubblewrap, which is missing; install it with: sudo apt-get install bubblewrap" >&2
