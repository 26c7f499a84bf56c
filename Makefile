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
	benchmarks/balancers benchmarks/harness tests/costs tests/simulate

.PHONY: environments demo demo-ep test test-whole test-processors test-all check bench gpu experiments docs config-reference clean

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
	$(BIN)/pytest -n 2 --dist loadfile -m "$(WHOLE)" $(APART)

# the tests of make test as six processors round, ATEN_CPU_CAPABILITY,MKL_CBWR each; ROOM=ep for one room. ATen and MKL
# choose their kernels apart: both have no AVX, AVX2 or AVX-512, or MKL takes less on a processor that is not Intel's, or
# ATen takes less where AVX-512 lacks what it asks for. Each of the six values stands in the list.
PROCESSORS ?= default,COMPATIBLE avx2,AVX2 avx512,AVX512 avx2,COMPATIBLE avx512,AVX2 avx2,AVX512
test-processors: $(READY)
	@case "$(PROCESSORS)" in *avx512*) grep -q avx512dq /proc/cpuinfo || { echo "this processor has no AVX-512;" \
		'name others: make test-processors PROCESSORS="default,COMPATIBLE avx2,AVX2 avx2,COMPATIBLE"' >&2; exit 1; } ;; esac
	@failed=; for each in $(PROCESSORS); do echo "== $$each"; \
		ATEN_CPU_CAPABILITY=$${each%,*} MKL_CBWR=$${each#*,} $(MAKE) test || failed="$$failed $$each"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# every grid, verl, other processors, a million malformed inputs, 200 kills: without a limit of time
test-all: NEWEST =
test-all: WHOLE =
test-all: APART = --ignore tests/robustness
test-all: test-whole test-megatron-newest test-megatron-grid test-verl test-processors
	$(BIN)/pytest -n 2 --dist loadfile -rP tests/robustness

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
