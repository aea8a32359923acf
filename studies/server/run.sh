#!/bin/sh
# The server and the engine alone on this computer's GPU; goes on where it was cut off:
# studies/server/run.sh 1xh200 --out FILE. Kernels alone, without a GPU: ... 1xh200 --compile-only.
# Tried on a CPU: ... 1xhost --out FILE.
cd "$(dirname "$0")/../.." || exit 1
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-.venv/bin/python}" studies/server/run.py "$@"
