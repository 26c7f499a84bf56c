# Trainers of others that examples/*/upstream patches, in an environment of their own, without what they would pull for
# GPUs. Their pins of transformers clash: each has its own in a folder that stands before the environment's. Included by
# the Makefile, which names PYTHON and hash.

PATCHES_ENV ?= .venv-patches
PATCHES_IMPORTS := transformers==5.15.0 accelerate==1.15.0 peft==0.18.1 ray==2.60.0 torchdata==0.11.0 datasets==5.2.0 \
	omegaconf==2.3.1 hydra-core==1.3.8 loguru==0.7.3 jaxtyping==0.3.11 func_timeout==4.3.5 pylatexenc==2.11 pillow==13.0.0 \
	torchao==0.18.0 tiktoken==0.14.0 einops==0.8.2 aiohttp==3.14.5 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 \
	py-cpuinfo==9.0.0 psutil==7.2.2
PATCHED_skyrl := skyrl==0.3.0 skyrl-gym==0.4.0 transformers==5.8.0
PATCHED_openrlhf := openrlhf==0.11.2 deepspeed==0.19.6
PATCHED_automodel := nemo-automodel==0.7.0 transformers==5.18.0 tokenizers==0.23.1
PATCHES_READY := $(PATCHES_ENV)/.ready-$(call hash,pyproject.toml constraints.txt make/patches.mk)
PATCHES ?= skyrl openrlhf automodel

.PHONY: patches-env night-patches

patches-env: $(PATCHES_READY)

$(PATCHES_READY):
	@echo "making $(PATCHES_ENV) and installing torch, SkyRL, OpenRLHF and NeMo Automodel into it: minutes, 2 GB"
	test -d $(PATCHES_ENV) || $(PYTHON) -m venv $(PATCHES_ENV)
	$(PATCHES_ENV)/bin/pip install --quiet --upgrade pip
	$(PATCHES_ENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(PATCHES_ENV)/bin/pip install --quiet torch==2.13.0 $(PATCHES_IMPORTS) numpy safetensors zstandard pytest hypothesis sybil
	$(foreach peer,skyrl openrlhf automodel,$(PATCHES_ENV)/bin/pip install --quiet --no-deps --upgrade \
		--target $(PATCHES_ENV)/with-$(peer) $(PATCHED_$(peer)) && ) true
	rm -f $(PATCHES_ENV)/.ready*
	touch $@

# each patch on the release that it is of, four steps on a CPU: PATCHES=skyrl for one of them. Those of TRL need none of
# this environment and are among the tests of make test
night-patches: $(PATCHES_READY)
	@failed=; for peer in $(PATCHES); do echo "== $$peer"; \
		PYTHONPATH="$(CURDIR)/src:$(abspath $(PATCHES_ENV))/with-$$peer" FOREROUTE_PATCHES=$$peer \
			$(PATCHES_ENV)/bin/python -m pytest -q tests/patches/test_$$peer.py || failed="$$failed $$peer"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }
