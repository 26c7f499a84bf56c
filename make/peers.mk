# Peers: packages whose MoE modules `foreroute.core` is tried on, in an environment of their own, without what they would
# pull for GPUs. Their pins of transformers clash: each has its own in a folder that stands before the environment's. The
# wheels of torchtitan and megatron-core import Triton, and the latter's asks for Python 3.12 and runs on 3.11. Included by
# the Makefile, which names PYTHON, PYTEST, KERNELS and hash.

PEERS_ENV ?= .venv-peers
PEERS_PACKAGES := torchtitan==0.3.0 nemo-automodel==0.7.0 veomni==0.1.12 xtuner==0.2.0 twinkle-kit==0.5.1 megatron-core==0.19.2
PEERS_IMPORTS := triton==3.9.0 spmd_types==0.2.3 tyro==1.0.17 typeguard==4.6.1 docstring_parser==0.18.0 torchdata==0.11.0 \
	torch_checkpointing==0.1.1 einops==0.8.2 mmengine==0.10.6 loguru==0.7.3 termcolor==3.3.0 addict==2.4.0 yapf==0.43.0 \
	opencv-python-headless==5.0.0.93
WITH_nemo-automodel := transformers==5.18.0
WITH_veomni := transformers==5.9.0 tokenizers==0.22.2 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 \
	certifi==2026.10.19.post1
WITH_xtuner := transformers==4.48.0 tokenizers==0.21.4 huggingface_hub==0.36.2 requests==2.34.2 urllib3==2.8.0 \
	charset-normalizer==3.5.3 certifi==2026.10.19.post1 platformdirs==4.14.9
PEERS_READY := $(PEERS_ENV)/.ready-$(call hash,pyproject.toml constraints.txt make/peers.mk)
PEERS ?= torchtitan nemo-automodel veomni xtuner

.PHONY: peers-env night-peers

peers-env: $(PEERS_READY)

$(PEERS_READY):
	@echo "making $(PEERS_ENV) and installing torch, torchtitan, nemo-automodel, veomni and xtuner into it: minutes, 4 GB"
	test -d $(PEERS_ENV) || $(PYTHON) -m venv $(PEERS_ENV)
	$(PEERS_ENV)/bin/pip install --quiet --upgrade pip
	$(PEERS_ENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(PEERS_ENV)/bin/pip install --quiet --constraint constraints.txt numpy safetensors zstandard transformers --group test
	$(PEERS_ENV)/bin/pip install --quiet --no-deps --ignore-requires-python $(PEERS_PACKAGES) $(PEERS_IMPORTS)
	$(foreach peer,nemo-automodel veomni xtuner,$(PEERS_ENV)/bin/pip install --quiet --no-deps --upgrade \
		--target $(PEERS_ENV)/with-$(peer) $(WITH_$(peer)) && ) true
	rm -f $(PEERS_ENV)/.ready*
	touch $@

# every kind of model of tests/peers against the core, and the table of docs/tensors.md: PEERS=veomni for one of them
night-peers: $(PEERS_READY) $(KERNELS)
	@failed=; for peer in $(PEERS); do echo "== $$peer"; \
		PYTHONPATH="$(CURDIR)/src:$(abspath $(PEERS_ENV))/with-$$peer" FOREROUTE_PEERS=$$peer \
			$(PEERS_ENV)/bin/python -m pytest -q tests/peers || failed="$$failed $$peer"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }
