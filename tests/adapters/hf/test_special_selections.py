"""Selections that are no single top-k of a router's own forward, beyond what `test_every_family` asks of all."""

import numpy as np
import pytest
import torch

from foreroute.capture import decode
from foreroute.doctor.examine import examine
from foreroute.errors import BatchMismatchError, ReplayError
from tests.adapters.hf.family_checks import attached, foreign_routes, run


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


def test_an_engines_trace_without_the_hash_layers_replays_the_others_and_leaves_these_native():
    model, routed = attached("deepseek_v4")
    whole = foreign_routes(routed)
    parts = np.split(whole.expert_ids_NLK.copy(), whole.offsets[1:-1])
    for ids in parts:
        ids[:, 0] = 0
    tokens = [whole.tokens(s) for s in range(len(whole))]
    assert whole.valid_N.all()
    captured = decode([ids[:-1] for ids in parts], model=routed.spec, token_ids=tokens)
    assert captured.spec == routed.spec.select(routed.spec.layers[1:])
    with routed.replay(captured), routed.record() as recording, torch.no_grad():
        run(model)
    replayed = recording.trace()
    assert np.array_equal(replayed.expert_ids_NLK[captured.valid_N], whole.expert_ids_NLK[captured.valid_N])
    assert np.array_equal(replayed.expert_ids_NLK[:, 0], whole.expert_ids_NLK[:, 0])
    assert examine(model, None, trace=captured).replay_error == ""
    with pytest.raises(BatchMismatchError, match=r"1000000.*model's.*experts"):
        routed.rows(decode(parts[0], model=routed.spec, token_ids=[1_000_000] * len(parts[0])))
