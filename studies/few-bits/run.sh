#!/bin/sh
# Every row on this computer's GPU, its results checked in the same run; goes on where it was cut
# off: studies/few-bits/run.sh 1xh200 --out FILE
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-.venv/bin/python}" studies/few-bits/run.py "$@"
