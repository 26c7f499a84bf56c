"""What known bugs of replay in Megatron are made of: the bare primitive driven as usual fails, the adapter does not."""

import pytest

from tests.adapters.megatron.forked_ranks import RankError, run

FAILS = {
    "forward_only_pass": ("Bare", 1, "recompute of micro-batch 0 went elsewhere"),
    "one_forward_one_backward": ("BareInOneAction", 2, "went elsewhere"),
    "virtual_stages": ("Bare", 2, "went elsewhere"),
    "batches_without_routes": ("Bare", 2, "recompute of micro-batch 0 went elsewhere"),
    "second_model": ("Bare", 1, "does not match instances"),
    "list_cleared_for_another_model": ("Bare", 1, "went to other experts"),
    "multi_token_prediction": ("Bare", 1, "does not match instances"),
    "dense_layers_first": ("Bare", 2, "went to other experts"),
    "batch_first": ("BareBatchFirst", 1, "went to other experts"),
    "exception_in_a_forward": ("Bare", 1, "a native step after a failed one: losses"),
    "picks_twice": ("Bare", 1, r"rows were sent to \[1 2\] experts|split_sizes|Split sizes"),
    "routes_kept_for_a_recompute_that_never_comes": ("Bare", 1, "bytes of expert ids were kept"),
}
"""situation: (how the bare primitive is driven, ranks, what is seen then)."""


@pytest.mark.parametrize("situation", FAILS)
def test_the_bare_primitive_fails(situation):
    driver, ranks, seen = FAILS[situation]
    with pytest.raises(RankError, match=seen):
        run(f"known_bugs.{situation}", driver, ranks=ranks)


@pytest.mark.parametrize("situation", FAILS)
def test_the_adapter_does_not(situation):
    run(f"known_bugs.{situation}", "Foreroute", ranks=FAILS[situation][1])
