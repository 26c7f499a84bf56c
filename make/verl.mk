# verl, in an environment of its own: it pins other versions of transformers than the trainer. Included by the Makefile,
# which names PYTHON, BIN (the trainer's environment) and READY. verl asks for less than it imports, and for no torch build.

VERL_ENV ?= .venv-verl
VERL_VERSION ?= 0.9.1
VERL_READY := $(VERL_ENV)/.ready-$(VERL_VERSION)
VERL_IMPORTS := cachetools uvicorn fastapi pyzmq msgspec TransferQueue nvtx mathruler

.PHONY: verl-env test-verl

verl-env: $(VERL_READY)

$(VERL_READY):
	test -d $(VERL_ENV) || $(PYTHON) -m venv $(VERL_ENV)
	$(VERL_ENV)/bin/pip install --quiet torch==2.13.0
	$(VERL_ENV)/bin/pip install --quiet torch==2.13.0 verl==$(VERL_VERSION) transformers==5.10.4 tensordict==0.10.0 \
		ray==2.60.0 $(VERL_IMPORTS) numba typer rich pydantic safetensors xxhash pytest sybil
	touch $@

# our source against the released verl, and against TRL and Hugging Face of the trainer's environment on the same trace
test-verl: $(READY) $(VERL_READY)
	PYTHONPATH="$(CURDIR)/src" $(VERL_ENV)/bin/python -m pytest -q tests/trainers/verl
	FOREROUTE_VERL_PYTHON=$(VERL_ENV)/bin/python $(BIN)/pytest -q tests/trainers/verl
