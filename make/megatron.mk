# The newest megatron-core, put before the one that the trainer's environment has. Included by the Makefile, which names
# BIN (the trainer's environment) and READY. Its wheel asks for Python 3.12 and runs on 3.11.

MEGATRON_VERSION ?= 0.19.2
MEGATRON_PATH ?= .megatron-$(MEGATRON_VERSION)
MEGATRON_READY := $(MEGATRON_PATH)/.ready

.PHONY: test-megatron-grid test-megatron-newest

# every variant of every split of the model, of which CI runs a quarter, every kind of plan executed in each, and the
# pipeline for 20 steps
test-megatron-grid: $(READY)
	FOREROUTE_MEGATRON_GRID=all $(BIN)/pytest -q $(addprefix tests/adapters/megatron/test_,grid.py plan_execution.py pipeline.py)

$(MEGATRON_READY): | $(READY)
	$(BIN)/pip install --quiet --target $(MEGATRON_PATH) --no-deps --ignore-requires-python \
		megatron-core==$(MEGATRON_VERSION)
	touch $@

# NEWEST= for the slow ones too
NEWEST ?= -m "not slow and not exhaustive"
test-megatron-newest: $(READY) $(MEGATRON_READY)
	PYTHONPATH="$(CURDIR)/$(MEGATRON_PATH)" FOREROUTE_MEGATRON=$(MEGATRON_VERSION) \
		$(BIN)/pytest -n 2 -q $(NEWEST) tests/adapters/megatron
