# Needs make and Python 3.11 or newer; everything else goes into .venv.
#   make run    decode with the embedded pair, compare all methods, draw a round
#   make test   the whole suite
#   make lab    JupyterLab
# Options go through ARGS:  make run ARGS="--tree-budget 16 --temperature 1"
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lab check pair clean

run: .venv/.core
	$(BIN)/ddtree-lab run $(ARGS)

test: .venv/.test
	$(BIN)/python -m pytest $(ARGS)

lab: .venv/.notebook
	$(BIN)/jupyter lab $(ARGS)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Trains target and drafter again from nothing (hours on two cores).
pair: .venv/.core
	$(BIN)/python -m assets.training

clean:
	rm -rf .venv build dist

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no Python of 3.11 or newer found; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# One stamp for each set of extras; a changed pyproject or constraints file installs again.
.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing ddtree-lab into .venv (PyTorch is large: a few minutes)"
	@$(PIP) -e .
	@touch $@

.venv/.test .venv/.notebook .venv/.dev: .venv/.%: .venv/.core
	@echo "installing the extra '$*'"
	@$(PIP) -e '.[$*]'
	@touch $@
