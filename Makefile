# make demo and make test need nothing but Python 3.11: they make .venv and install everything into it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1

.PHONY: demo test check bench experiments docs clean

demo: $(READY)
	$(BIN)/foreroute demo

test: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	$(BIN)/python -m benchmarks all --json

# every routing mode, three seeds each, one report: about half an hour
experiments: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" benchmarks/experiments.sh runs/experiments

# torch is installed on its own first, in the pinned version, before anything can ask for another
$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	touch $@

include make/vllm.mk

clean:
	rm -rf $(VENV) .venv-vllm site .mypy_cache .ruff_cache .pytest_cache .hypothesis
