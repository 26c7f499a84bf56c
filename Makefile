# make demo and make test need nothing but Python 3.11: they make .venv and install everything into it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
# tests start hundreds of processes, and each would compile all it imports anew
unexport PYTHONDONTWRITEBYTECODE
# compiled kernels, which make clean removes
export NUMBA_CACHE_DIR = $(CURDIR)/.numba_cache
KERNELS := .numba_cache/.sources
# where kernels stand, and what they take code and constants from
KERNEL_SOURCES := src/foreroute/kernels.py $(addprefix src/foreroute/,trace layout plan costs planner simulate) \
	benchmarks/balancers benchmarks/harness tests/costs

.PHONY: environments demo demo-ep test test-whole test-all check bench gpu experiments docs config-reference clean

demo: $(READY)
	$(BIN)/foreroute demo

# what .ci/run installs, side by side
environments: $(READY) vllm-env

# the demo's task on four expert-parallel ranks of this machine
demo-ep: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m foreroute.cli demo-ep --folder runs/demo-ep/$$(date +%Y-%m-%d_%H-%M-%S)

# tests run every kernel briefly: compiling them at level 1 takes 33 s of the planner's 79 s, and changes no result.
# numba does not mind the level when it looks for what it compiled before
test test-whole test-megatron-newest test-megatron-grid: export NUMBA_OPT = 1
test test-whole test-megatron-newest test-megatron-grid: export NUMBA_CACHE_DIR = $(CURDIR)/.numba_cache/level-1
# every room on small sizes; ROOM=trace for one
ROOM ?=
test: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not exhaustive" $(ROOM:%=tests/%)

# slow ones too: real engines, real processes, and a sample of every grid
WHOLE ?= not exhaustive
test-whole: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile -m "$(WHOLE)"

# every grid, verl, a million malformed inputs, 200 kills: without a limit of time
test-all: NEWEST =
test-all: WHOLE =
test-all: test-whole test-megatron-newest test-megatron-grid test-verl
	for case in fuzz doors kills; do $(BIN)/python -m benchmarks $$case --json || exit 1; done

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# docs/configuration.md, after a change of a key, its default or its text
config-reference: $(READY)
	$(BIN)/python make/config_reference.py

bench: $(READY)
	$(BIN)/python -m benchmarks all --json

# what only a GPU can show, in nine minutes; with PYTHON= it takes that one, as it is, and makes no .venv
DEVICE ?= cuda
ifeq ($(origin PYTHON),file)
gpu: $(READY)
	$(BIN)/python -m benchmarks gpu --json --device $(DEVICE)
else
gpu:
	$(PYTHON) -m benchmarks gpu --json --device $(DEVICE)
endif

# cells of the grid that have no result yet, two at a time, then docs/evidence.md: about three hours of one core in all
experiments: $(READY) vllm-env
	$(BIN)/python -m experiments run
	$(BIN)/python -m experiments page

# torch is installed on its own first, in the pinned version, before anything can ask for another
$(READY): pyproject.toml constraints.txt | $(KERNELS)
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON); name a Python from 3.11 on: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV) and installing into it: some minutes, with torch as the largest download"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	touch $@

# numba looks for a change in the file that a kernel stands in, and in no other
$(KERNELS): $(shell find $(KERNEL_SOURCES) -name '*.py')
	rm -rf $(@D)
	mkdir $(@D)
	touch $@

include make/vllm.mk
include make/megatron.mk
include make/verl.mk
include make/wheel.mk

clean:
	rm -rf $(VENV) .venv-vllm .venv-verl dist .numba_cache .megatron-* site .mypy_cache .ruff_cache .pytest_cache .hypothesis
