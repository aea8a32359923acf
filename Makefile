# make demo   first result: probe this CPU, fit, predict, run, compare
# make test   everything that needs no GPU and no patience
# make slow   the same with the tests of minutes, and twenty times as many random cases (an hour)
# make check  the one gate: lint, types, tests, generated files
# make attack SECONDS=3600  broken plans, machines, files and command lines, drawn at random: is any law broken?
# make studies  every study's tables, figure and page again, from the fits and records on file (20 core-minutes)
# make venv   .venv with everything the above need

VENV := .venv
STAMP := $(VENV)/.installed
# Looked for once, and only where it is needed.
PYTHON ?= $(eval PYTHON := $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p)))))$(PYTHON)
BIN := $(VENV)/bin

# Hundreds of processes under test would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv compiler demo test slow check attack lint types generated studies clean

help:
	@sed -n 's/^# make/make/p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer not found. Install it (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot create virtual environments. Install them (Debian: apt-get install python3-venv), then run make again" >&2; exit 2; }
	@echo "make: installing Python packages (300 MB, most of them for tests) into $(VENV): one to five minutes, once" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --editable '.[test]' || echo FAILED; } | \
	  sed -un -e 's/^Collecting \([A-Za-z0-9._-]*\).*/make: fetching \1/p' -e 's/^Installing collected packages:.*/make: unpacking all of them/p' -e '/^FAILED$$/q2' >&2 || \
	  { echo "make: the packages could not be installed. Check the network or the package index, then run make again" >&2; exit 2; }
	@touch $@
	@echo "make: installed. Next: make demo, or . $(VENV)/bin/activate" >&2

compiler:
	@command -v "$${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || \
	  { echo "make: no C++ compiler: the engine is compiled for this CPU. Install one (Debian: apt-get install g++), or name it in CXX" >&2; exit 2; }

demo: $(STAMP) compiler
	@$(BIN)/twin demo

# tests/conftest.py says how many processes, and which files stay together; loadfile: those of a file share its kernels.
# The models of the tests are tiny: more threads of OpenBLAS and torch would only wait for each other.
test slow: export OMP_NUM_THREADS := 1

test: $(STAMP) compiler
	@$(BIN)/python -m pytest -q -m "not gpu and not slow" -n auto --dist loadfile --no-loadscope-reorder

slow: $(STAMP) compiler
	@MONOTWIN_DRAWS=20 $(BIN)/python -m pytest -q -m "not gpu" -n auto --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . || { echo 'make: lint failed; try: ruff check --fix . && ruff format .' >&2; exit 1; }

types: $(STAMP)
	@$(BIN)/mypy --strict -p twin

generated: $(STAMP)
	@$(BIN)/python -m twin.commands.reference > docs/commands.md
	@$(BIN)/python -m twin.report.words > docs/glossary.md
	@$(BIN)/python -m twin.kernel.facts > native/platform/facts.h
	@$(BIN)/python -m studies.common.readme_figure > docs/compared.svg

# Each line may be run alone. What is known already is not simulated again.
studies: $(STAMP) compiler
	@$(BIN)/python -m studies.common.study_page
	@for page in studies/*/page.py; do echo $$page; $(BIN)/python $$page || exit 1; done

check: lint types test

SECONDS ?= 60

attack: $(STAMP) compiler
	@$(BIN)/python -m tests.attack --seconds $(SECONDS)

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache
