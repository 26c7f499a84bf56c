# Parts of `make night` that belong to no framework. Included by the Makefile, which names BIN, PYTEST, KERNELS and READY,
# behind make/vllm.mk.

.PHONY: night-exhaustive night-robustness night-kernels night-processors night-oldest night-newest night-engines

# what is half a minute each, of which test-whole shows a part
night-exhaustive: $(READY)
	$(PYTEST) -m exhaustive

# a million malformed inputs, every kind of bad path
night-robustness: $(READY)
	FOREROUTE_SAMPLE=night $(PYTEST) -rP tests/robustness

# the loops in C++: compiled for a newer processor they find the same, and with checks of bounds none leaves its arrays
NEWER ?= x86_64_v3
night-kernels: $(READY)
	mkdir -p build
	$(BIN)/python hatch_build.py build/newer.so -mcpu=$(NEWER)
	FOREROUTE_KERNELS=$(CURDIR)/build/newer.so $(PYTEST) -m "not exhaustive" $(addprefix tests/,planner costs simulate)
	$(BIN)/python hatch_build.py build/checked.so -DCHECK_BOUNDS
	FOREROUTE_KERNELS=$(CURDIR)/build/checked.so $(PYTEST) -m "not exhaustive" \
		$(addprefix tests/,trace layout plan costs planner simulate)

# the tests of make test as six processors round, ATEN_CPU_CAPABILITY,MKL_CBWR each; ROOM=ep for one room. ATen and MKL
# choose their kernels apart: both have no AVX, AVX2 or AVX-512, or MKL takes less on a processor that is not Intel's, or
# ATen takes less where AVX-512 lacks what it asks for. Each of the six values stands in the list. oneDNN is held to what
# ATen has: torch packs for AMX where oneDNN finds it, and then lacks AVX-512.
PROCESSORS ?= default,COMPATIBLE avx2,AVX2 avx512,AVX512 avx2,COMPATIBLE avx512,AVX2 avx2,AVX512
night-processors: $(READY)
	@case "$(PROCESSORS)" in *avx512*) grep -q avx512dq /proc/cpuinfo || { echo "this processor has no AVX-512;" \
		'name others: make night PART=processors PROCESSORS="default,COMPATIBLE avx2,AVX2 avx2,COMPATIBLE"' >&2; exit 1; } ;; esac
	@failed=; for each in $(PROCESSORS); do echo "== $$each"; \
		case $$each in default,*) most=SSE41 ;; avx2,*) most=AVX2 ;; *) most=DEFAULT ;; esac; \
		ONEDNN_MAX_CPU_ISA=$$most ATEN_CPU_CAPABILITY=$${each%,*} MKL_CBWR=$${each#*,} $(MAKE) test || \
			failed="$$failed $$each"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# the oldest releases that an install may have, in an environment of their own: those of a base install under the rooms
# that need no more, then those of the extra hf too. Megatron is not there
OLDEST := .venv-oldest
OLDEST_PYTEST = PYTHONPATH=src $(OLDEST)/bin/python -m $(notdir $(PYTEST)) -m "not slow and not exhaustive"
LIGHT_ROOMS := trace layout planner costs mismatch capture kernels
HF_ROOMS := core adapters/hf replay
night-oldest: $(KERNELS)
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet $$($(PYTHON) make/lower_bounds.py) pytest pytest-xdist hypothesis scipy sybil pydantic numba ziglang
	$(OLDEST_PYTEST) $(LIGHT_ROOMS:%=tests/%)
	$(OLDEST)/bin/pip install --quiet $$($(PYTHON) make/lower_bounds.py hf) peft accelerate
	$(OLDEST_PYTEST) -k "not megatron" $(HF_ROOMS:%=tests/%)

# what pip resolves today without constraints, in an environment of its own; of torch what has a build for CPUs. Another
# one, of several gigabytes: make night PART=newest NEWEST_TORCH=torch
NEWEST := .venv-newest
NEWEST_TORCH ?= torch==2.13.0
night-newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --upgrade pip
	$(NEWEST)/bin/pip install --quiet $(NEWEST_TORCH)
	$(NEWEST)/bin/pip install --quiet --editable '.[all]' --group test
	$(NEWEST)/bin/pip list --format freeze | grep -E "^(accelerate|megatron-core|numpy|peft|pydantic|safetensors|torch|transformers|trl)=="
	$(NEWEST)/bin/$(notdir $(PYTEST)) -m "not slow and not exhaustive"
	$(NEWEST)/bin/foreroute demo

# the oldest release of vLLM, the default and the newest, as engines of this machine against Hugging Face: half an hour at
# most
night-engines: $(READY) $(VLLM_READY) $(VLLM_OTHERS:%=%/.ready)
	set -e; for made in $(VLLM_ENV) $(VLLM_OTHERS); do \
	  FOREROUTE_VLLM_PYTHON=$$made/bin/python $(BIN)/pytest -q tests/engines/releases; \
	done
