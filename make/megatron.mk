# The newest megatron-core, put before the one that the trainer's environment has. Included by the Makefile, which names
# BIN (the trainer's environment) and READY. Its wheel asks for Python 3.12 and runs on 3.11.

MEGATRON_VERSION ?= 0.19.2
MEGATRON_PATH ?= .megatron-$(MEGATRON_VERSION)
MEGATRON_READY := $(MEGATRON_PATH)/.ready

.PHONY: megatron-newest test-megatron-newest night-megatron

megatron-newest: $(MEGATRON_READY)

$(MEGATRON_READY): | $(READY)
	$(BIN)/pip install --quiet --target $(MEGATRON_PATH) --no-deps --ignore-requires-python \
		megatron-core==$(MEGATRON_VERSION)
	touch $@

ON_NEWEST := PYTHONPATH="$(CURDIR)/$(MEGATRON_PATH)" FOREROUTE_MEGATRON=$(MEGATRON_VERSION)
# what a release can break: exactness, sessions, refusals, and a sample of the grid; the rest by night
test-megatron-newest: $(READY) $(MEGATRON_READY)
	$(ON_NEWEST) $(PYTEST) -m "not slow and not exhaustive" -k "not of_transformers" \
		$(patsubst %,tests/adapters/megatron/test_%.py,exactness sessions refusals router_statistics \
		layers_and_rows both_frameworks host_waits over_ranks flex_plans grid forked_ranks rank_budgets) \
		tests/replay/test_sessions.py

# every test on the newest release; `make night PART=exhaustive` has them on the other
night-megatron: $(READY) $(MEGATRON_READY)
	$(ON_NEWEST) $(PYTEST) -k "not of_transformers" tests/adapters/megatron tests/replay/test_sessions.py
