"""Selections that are no single top-k of a router's own forward, beyond what `test_every_family` asks of all."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.capture import decode
from foreroute.doctor.examine import examine
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.trace import LayerKind
from tests.adapters.hf.family_checks import attached, foreign_routes, run, watching
from tests.adapters.hf.model_runs import batch_of
from tests.replay.session_subject import router_paths
from tests.tiers import grid

PADDED = batch_of(9, 6, 4)
KEPT = PADDED["attention_mask"].bool().reshape(-1)


@grid("name", ["deepseek_v4", "jetmoe", "llama4", "phimoe"], quick=2)
def test_padded_rows_route_themselves_and_the_others_are_forced(name):
    model, routed = attached(name)
    trace = foreign_routes(routed, PADDED)
    with routed.record() as native, torch.no_grad():
        model(**PADDED, use_cache=False)
    with routed.replay(trace), routed.record() as replayed, watching(name, routed) as calls, torch.no_grad():
        model(**PADDED, use_cache=False)
    assert replayed.trace().equals(trace)
    assert not native.trace().equals(trace)
    first = calls[0]
    assert first.ids.shape == (KEPT.numel(), routed.spec.top_k)
    with routed.record(), watching(name, routed) as untouched, torch.no_grad():
        model(**PADDED, use_cache=False)
    assert torch.equal(first.ids[~KEPT], untouched[0].ids[~KEPT])


def test_a_trace_that_is_shifted_against_its_tokens_disagrees_with_the_hash_layers():
    _, routed = attached("deepseek_v4")
    trace = foreign_routes(routed)
    assert [layer.kind for layer in routed.spec.layers] == [LayerKind.HASH, LayerKind.DECODER, LayerKind.DECODER]
    shifted = [np.roll(ids, 1, axis=0) for ids in np.split(trace.expert_ids_NLK, trace.offsets[1:-1])]
    with (
        pytest.raises(BatchMismatchError, match=r"0 routes.*table.*0.*\d+"),
        routed.replay(replace(trace, expert_ids_NLK=np.concatenate(shifted))),
    ):
        run(routed.model)


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


def test_vision_experts_of_ernie_are_left_out_and_vision_tokens_refused():
    model, routed = attached("ernie4_5_vl_moe")
    assert all("text_moe" in path for path in router_paths(routed))
    mixed = {"input_ids": PADDED["input_ids"][:1], "moe_mm_token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]])}
    model(**mixed, use_cache=False)
    with pytest.raises(ReplayError, match="in 6 of the 9 rows"), routed.record(), torch.no_grad():
        model(**mixed, use_cache=False)
