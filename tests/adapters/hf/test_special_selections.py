"""Selections that are no single top-k of a router's own forward, beyond what `test_every_family` asks of all."""

import pytest
import torch

from foreroute.errors import ReplayError
from tests.adapters.hf.family_checks import attached, run


def test_phimoe_in_training_picks_at_random_and_its_own_picks_replay_bit_for_bit():
    model, routed = attached("phimoe")
    for layer in model.model.layers:  # a band wide enough for several experts
        layer.mlp.router.router_jitter_noise = 0.5
    model.train()
    with routed.record() as sampled:
        native = run(model)
    model.eval()
    with routed.record() as greedy, torch.no_grad():
        run(model)
    assert not sampled.trace().equals(greedy.trace())
    model.train()
    with routed.replay(sampled.trace()):
        assert torch.equal(run(model), native)


def test_vision_tokens_of_ernie_are_refused():
    """Their experts are left out of the routes."""
    model, routed = attached("ernie4_5_vl_moe")
    mixed = {
        "input_ids": torch.arange(1, 10)[None],
        "moe_mm_token_type_ids": torch.tensor([[0] * 3 + [1] * 3 + [0] * 3]),
    }
    model(**mixed, use_cache=False)
    with pytest.raises(ReplayError, match="in 6 of the 9 rows"), routed.record(), torch.no_grad():
        model(**mixed, use_cache=False)
