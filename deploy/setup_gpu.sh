#!/usr/bin/env bash
# Makes a virtual environment with everything that `make run-gpu` needs (Linux, x86-64, NVIDIA GPUs, Python 3.12). Uses
# uv if it is installed, which also brings the right Python, and pip otherwise.
set -euo pipefail

PYTHON=${PYTHON:-python3.12}
VENV=${VENV:-.venv-gpu}
LOCK=requirements/gpu.txt

# Its wheels are for CUDA 13, which needs a driver of at least 580.
DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
[ -n "$DRIVER" ] || { echo "setup: nvidia-smi shows no GPU; install NVIDIA's driver, or run \`make run\`, which needs no GPU" >&2; exit 1; }
[ "${DRIVER%%.*}" -ge 580 ] || { echo "setup: the driver is $DRIVER, but $LOCK is for CUDA 13, which needs 580 or newer" >&2; exit 1; }
# Triton compiles what starts its kernels on this host, at their first use.
command -v "${CC:-gcc}" >/dev/null || { [ -z "${CC:-}" ] && command -v clang >/dev/null; } || {
  echo "setup: no C compiler found, which GPU kernels need; install gcc" >&2; exit 1; }

rm -rf "$VENV"
if command -v uv >/dev/null; then
  uv venv --quiet --python 3.12 "$VENV"
  install() { uv pip install --quiet --python "$VENV/bin/python" --no-deps "$@"; }
else
  command -v "$PYTHON" >/dev/null || { echo "setup: $PYTHON not found; install Python 3.12 or uv, or run: make run-gpu GPU_PYTHON=/path/to/python3.12" >&2; exit 1; }
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
    echo "setup: $PYTHON is $("$PYTHON" --version), but $LOCK is for Python 3.12" >&2; exit 1; }
  "$PYTHON" -m venv "$VENV"
  install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$@"; }
fi
"$VENV/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || {
  echo "setup: Python.h is missing, which GPU kernels need; install python3.12-dev" >&2; exit 1; }
install --require-hashes -r "$LOCK"
install --editable .
