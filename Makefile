# make demo and make test need nothing but Python 3.11: they make .venv and install everything into it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# environments carry the hash of what they were made from: what has changed is made anew, and nothing else
hash = $(shell cat $(sort $(1)) | sha256sum | cut -c 1-12)
INSTALLED := $(VENV)/.ready-$(call hash,pyproject.toml constraints.txt)
# and what checks and documentation need besides, which tests do not
CHECKING := $(VENV)/.ready-checks-$(call hash,pyproject.toml constraints.txt)
# the loops in C++, in one library
KERNELS := src/foreroute/_kernels.so
READY := $(INSTALLED) $(KERNELS)
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
# tests start hundreds of processes, and each would compile all it imports anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: environments kernels demo demo-ep test test-whole night check checks bench gpu experiments docs config-reference clean

demo: $(READY)
	$(BIN)/foreroute demo

# what .ci/run installs, side by side
environments: $(READY) $(CHECKING) vllm-env megatron-newest

# the demo's task on four expert-parallel ranks of this machine
demo-ep: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m foreroute.cli demo-ep --folder runs/demo-ep/$$(date +%Y-%m-%d_%H-%M-%S)

# tests/slowest_files.txt orders the files
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# every room on small sizes; ROOM=trace for one
ROOM ?=
test: $(READY)
	$(PYTEST) -m "not slow and not exhaustive" $(ROOM:%=tests/%)

# slow ones too: real engines, real processes, and a sample of every grid
test-whole: $(READY)
	$(PYTEST) -m "not exhaustive" --junitxml=.pytest_cache/whole.xml

# what nobody waits for, before an issue that touches it is closed: make night PART=verl for one part. The parts stand in
# make/night.mk and the files beside it
NIGHT := exhaustive robustness kernels processors oldest newest engines settings peers megatron verl scores patches
PART ?= $(NIGHT)
night: $(PART:%=night-%)

check: $(READY) $(CHECKING)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

# what needs no test to run: .ci/run has it beside the tests
checks: check wheel-check

docs: $(READY) $(CHECKING)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# the keys of docs/train.md and docs/simulate.md, after a change of a key, and docs/settings.md and the table of peers in
# docs/tensors.md, after one of a mark
config-reference: $(READY)
	$(BIN)/python make/config_reference.py
	$(BIN)/python make/settings_page.py
	$(BIN)/python make/peers_table.py

bench: $(READY)
	$(BIN)/python -m benchmarks all --json

# what only a GPU can show, in nine minutes: tests, of which one that crashes or hangs costs the others nothing, then
# figures. With PYTHON= it takes that one, as it is, and makes no .venv; the library of loops is compiled if it is not there
DEVICE ?= cuda
# in the order of their weight: what is left when time is used up is skipped
GPU_TESTS := tests/gpu/test_families.py tests/gpu/test_sampling_masks.py tests/adapters/hf/test_on_devices.py \
	$(addprefix tests/gpu/test_,plans.py trainer.py megatron.py compiled.py)
# --confcutdir: the conftest.py above it runs the documentation, with packages that a bare machine lacks
GPU_PYTEST := -m pytest -m gpu --confcutdir tests -n 1 --max-worker-restart 20 \
	-o faulthandler_timeout=100 -o faulthandler_exit_on_timeout=true
define run-gpu
ends=$$(( $$(date +%s) + 530 )); failed=0; \
	$(1) $(GPU_PYTEST) --device $(DEVICE) --ends-at $$(( ends - 220 )) --junitxml=.pytest_cache/gpu.xml $(GPU_TESTS) || failed=1; \
	$(1) -m benchmarks gpu --json --device $(DEVICE) --ends-at $$ends || failed=1; exit $$failed
endef
ifeq ($(origin PYTHON),file)
gpu: $(READY)
	@$(call run-gpu,$(BIN)/python)
else
gpu:
	@test -f $(KERNELS) || $(PYTHON) hatch_build.py
	@export PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH}; $(call run-gpu,$(PYTHON))
endif

# cells of the grid that have no result yet, two at a time, then docs/evidence.md: about three hours of one core in all
experiments: $(READY) vllm-env
	$(BIN)/python -m experiments run
	$(BIN)/python -m experiments page

# bytecode is made of what is imported, and then: pip would make it of everything
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
# torch is installed first, in the pinned version, before anything can ask for another, and what builds foreroute, which
# would else be installed twice
$(INSTALLED):
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON); name a Python from 3.11 on: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV) and installing into it: some minutes, with torch as the largest download"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(PIP_INSTALL) torch --group build
	$(PIP_INSTALL) --no-build-isolation --editable '.[all]' --group test
	rm -f $(VENV)/.ready*
	touch $@

$(CHECKING): | $(INSTALLED)
	$(PIP_INSTALL) --group dev
	touch $@

kernels: $(KERNELS)
$(KERNELS): $(shell find src/foreroute -name '*.[ch]pp') hatch_build.py | $(INSTALLED)
	$(BIN)/python hatch_build.py

include make/vllm.mk
include make/night.mk
include make/settings.mk
include make/peers.mk
include make/patches.mk
include make/megatron.mk
include make/verl.mk
include make/release.mk
include make/scores.mk

clean:
	rm -rf $(VENV) .venv-vllm* .venv-verl .venv-oldest .venv-newest .venv-settings .venv-peers .venv-patches dist $(KERNELS) .megatron-* site .mypy_cache .ruff_cache .pytest_cache .hypothesis
