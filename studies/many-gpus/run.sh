#!/bin/sh
# Everything that a machine of 2, 4 or 8 GPUs runs, in one command that goes on where it was cut
# off: studies/many-gpus/run.sh 4xh200 --out FOLDER. Tried on a CPU: ... 2xhost --out FOLDER.
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-.venv/bin/python}" studies/many-gpus/run.py "$@"
