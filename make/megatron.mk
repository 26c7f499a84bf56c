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
# what a release can break: what routers, dispatchers and calls are, and replay through them. What is refused, read and
# counted by code of ours alone is the same on the pinned release; by night all of it runs
REPLAYED := own_routes_change_no_bit_and_others_are_followed the_model_is_as_before_after_sessions_and_errors \
	rows_without_a_route_are_routed_by_the_model_and_others_as_given micro_batches_in_flight_keep_their_own_routes \
	padding_is_spread_over_experts_and_real_rows_go_where_they_went \
	a_recomputation_gives_experts_what_the_forward_gave_them \
	recorded_margins_are_the_gap_to_the_best_expert_that_could_have_been_picked
test-megatron-newest: $(READY) $(MEGATRON_READY)
	$(ON_NEWEST) $(PYTEST) -m "not slow and not exhaustive" \
		$(patsubst %,tests/adapters/megatron/test_%.py,exactness router_statistics layers_and_rows \
		over_ranks flex_plans grid rank_budgets) \
		tests/adapters/megatron/test_sessions.py::test_megatrons_own_replay_may_not_be_active_and_is_left_alone
	$(ON_NEWEST) $(PYTEST) -m "not exhaustive" \
		$(patsubst %,"tests/replay/test_sessions.py::test_of_megatron[%]",$(REPLAYED))

# every test on the newest release; `make night PART=exhaustive` has them on the other
night-megatron: $(READY) $(MEGATRON_READY)
	$(ON_NEWEST) $(PYTEST) -k "not of_transformers" tests/adapters/megatron tests/replay/test_sessions.py
