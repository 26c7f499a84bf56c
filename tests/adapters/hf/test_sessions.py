"""What sessions of transformers' models have beside those of others: caches, copies, layers that select otherwise."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute import core
from foreroute.adapters import hf
from foreroute.capture import decode
from foreroute.doctor.examine import examine
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trace import LayerKind
from tests.adapters.hf.family_checks import attached, foreign_routes, run
from tests.adapters.hf.model_runs import batch_of, with_routes
from tests.tiers import grid

BATCH = batch_of(9, 6, 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda routed: pickle.loads(pickle.dumps(routed))])
def test_what_was_attached_can_be_copied_with_its_model(copied):
    _, routed, trace = with_routes(BATCH)
    with routed.record(), pytest.raises(ReplayError, match="copied inside"):
        copied(routed.model.model.layers[1])
    other = copied(routed)
    assert other.model is not routed.model
    other.model.lm_head.weight.data.zero_()
    results = []
    for each in (routed, other):
        with each.replay(trace), each.record() as recording, torch.no_grad():
            results.append(each.model(**BATCH).logits)
        assert recording.trace().equals(trace)
    assert results[0].any()
    assert not results[1].any()


def test_a_forward_that_continues_a_cache_is_not_replayed():
    """Even where its tokens are those of the trace: they stand at other positions."""
    batch = batch_of(4, seed=1)
    model, routed, trace = with_routes(batch)
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"], use_cache=True).past_key_values
        with pytest.raises(BatchMismatchError, match=r"continues.*4 positions"), routed.replay(trace):
            model(input_ids=batch["input_ids"], past_key_values=cache, use_cache=True)


@pytest.mark.shows(
    "Hugging Face",
    "continuous batching (`generate_batch`)",
    refused="it runs in a thread of its own, on parts of sequences",
)
def test_continuous_batching_is_refused_before_it_begins():
    model, routed, trace = with_routes(BATCH)
    for session in (routed.record(), routed.replay(trace)):
        with pytest.raises(ReplayError, match=r"thread.*generate"), session:
            model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    assert "init_continuous_batching" not in vars(model)


GOES_ON = {
    "by its mask": {"attention_mask": torch.ones(2, 9, dtype=torch.long)},
    "in one row": {"position_ids": torch.stack([torch.arange(4), torch.arange(3, 7)])},
}
NOT_RECOGNISED = r"key-value cache.*not recognised"


@pytest.mark.shows(
    "Hugging Face", "a key-value cache of a class of one's own", refused="it does not say how many positions it holds"
)
@grid("given", GOES_ON.values(), ids=GOES_ON, quick=1)
def test_a_forward_that_seems_to_continue_an_unknown_cache_is_refused(given):
    """It would be recorded as the beginning of other sequences."""
    batch = {"input_ids": batch_of(4, 4)["input_ids"]} | given
    _, routed, trace = with_routes(batch_of(4, 4))
    for session in (routed.record(), routed.replay(trace)):
        with pytest.raises(BatchMismatchError, match=NOT_RECOGNISED), session, torch.no_grad():
            routed.model(**batch)
    with pytest.raises(core.ReplayError, match=NOT_RECOGNISED), core.attach(routed.model).record():
        routed.model(**batch)
    with other_device(), torch.no_grad():
        there = hf.attach(routed.model.to(DEVICE))
        with pytest.raises(BatchMismatchError, match=NOT_RECOGNISED), there.replay(trace):
            there.model(**{name: each.to(DEVICE) for name, each in batch.items()})


def test_a_trace_that_is_shifted_against_its_tokens_disagrees_with_the_hash_layers():
    _, routed = attached("deepseek_v4")
    trace = foreign_routes(routed)
    assert [layer.kind for layer in routed.spec.layers] == [LayerKind.HASH, LayerKind.DECODER, LayerKind.DECODER]
    shifted = [np.roll(ids, 1, axis=0) for ids in np.split(trace.expert_ids_NLK, trace.offsets[1:-1])]
    shifted = replace(trace, expert_ids_NLK=np.concatenate(shifted))
    with pytest.raises(BatchMismatchError, match=r"0 routes.*table.*0.*\d+"), routed.replay(shifted):
        run(routed.model)


def test_an_engines_trace_without_the_hash_layers_replays_the_others_and_leaves_these_native():
    model, routed = attached("deepseek_v4")
    whole = foreign_routes(routed)
    assert whole.valid_N.all()
    ids, tokens = whole.expert_ids_NLK.copy(), [whole.tokens(s) for s in range(len(whole))]
    ids[:, 0] = 0
    parts = np.split(ids, whole.offsets[1:-1])
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
    with routed.record() as greedy, torch.no_grad():
        run(model)
    model.train()
    with routed.record() as sampled:
        native = run(model)
    assert not sampled.trace().equals(greedy.trace())
    with routed.replay(sampled.trace()):
        assert torch.equal(run(model), native)


def test_vision_tokens_of_ernie_are_refused():
    """Their experts are left out of the routes."""
    model, routed = attached("ernie4_5_vl_moe")
    token_types = torch.tensor([[0] * 3 + [1] * 3 + [0] * 3])
    mixed = {"input_ids": torch.arange(1, 10)[None], "moe_mm_token_type_ids": token_types}
    model(**mixed, use_cache=False)
    with pytest.raises(ReplayError, match="in 6 of the 9 rows"), routed.record(), torch.no_grad():
        model(**mixed, use_cache=False)
