"""Models whose layers differ in experts and picks: recorded, saved, replayed and measured as any other."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

import foreroute as fr
from foreroute.adapters import hf
from foreroute.errors import ReplayError, SpecMismatchError
from foreroute.testing.models import tiny
from foreroute.trace.operations import count_assignments
from tests.adapters.hf import family_checks
from tests.adapters.hf.families import FAMILIES, Family
from tests.adapters.hf.family_checks import CHECKS, require_bit_equal
from tests.adapters.hf.model_runs import batch_of, loss_of, random_routes
from tests.replay.sessions_telemetry import recount, require_agreement
from tests.tiers import grid

PICKS = [1, 3, 2]
SIZES = ((8, 2), (6, 3), (5, 1))
BATCH = batch_of(9, 6, 4)
KEPT = BATCH["attention_mask"].bool().reshape(-1)


@pytest.fixture
def picks_by_layer(monkeypatch):
    """The name of a family whose tiny model has another K in each layer."""
    name = "hunyuan_v1_moe"
    monkeypatch.setitem(FAMILIES, name, Family(FAMILIES[name].model, {"moe_topk": PICKS}))
    family_checks.attached_once.cache_clear()
    yield name
    family_checks.attached_once.cache_clear()


@grid("check", CHECKS, ids=lambda check: check.__name__, quick=4)
def test_a_family_with_picks_by_layer_passes_every_check(picks_by_layer, check):
    assert family_checks.shared(picks_by_layer)[1].spec.sizes == tuple((8, top_k) for top_k in PICKS)
    assert check(picks_by_layer) is None


def uneven(sizes=SIZES, **options):
    """A tiny Qwen3 whose layers have these experts and picks."""
    options["num_hidden_layers"] = len(sizes)
    models = [
        tiny("qwen3_moe", seed=seed, num_experts=num_experts, num_experts_per_tok=top_k, **options)
        for seed, (num_experts, top_k) in enumerate(sizes)
    ]
    for layer, other in enumerate(models):
        models[0].model.layers[layer].mlp = other.model.layers[layer].mlp
    return models[0]


def recorded(model, routed, **options):
    with routed.record(**options) as recording, torch.no_grad():
        model(**BATCH, use_cache=False)
    return recording


def test_own_routes_change_no_bit_and_come_back_padded():
    model = uneven()
    routed = hf.attach(model)
    assert routed.spec.sizes == SIZES
    require_bit_equal(uneven(), model, routed, partial(loss_of, batch=BATCH))
    own = recorded(model, routed).trace()
    assert own.expert_ids_NLK[0, 2].tolist()[1:] == [255, 255]
    back = fr.RoutingTrace.from_padded(routed.spec, BATCH["input_ids"], *own.to_padded()[1:])
    assert back.equals(own)


@grid("sizes", [SIZES, ((200, 2), (6, 3), (150, 1)), ((300, 2), (6, 3), (5, 1))], quick=1)
def test_telemetry_is_what_a_recount_finds_and_no_filler_is_an_expert(sizes):
    model = uneven(sizes)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    seen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda gate, args, output: seen.append(linear(args[0].flatten(0, -2), gate.weight)[KEPT].softmax(-1))
        )
    with routed.replay(trace, telemetry=True, padding="spread") as session:
        executed = recorded(model, routed).trace()
    agreement, counts_LE = session.agreement(), session.expert_counts_LE()
    assert executed.equals(trace)
    layers = recount([scores.detach().double().numpy() for scores in seen], trace)
    require_agreement(agreement, trace, layers)
    for counts_E, (_, own, _) in zip(counts_LE, layers, strict=True):
        assert counts_E.tolist() == np.bincount(own.flatten(), minlength=routed.spec.num_experts).tolist()
    with routed.replay(trace, telemetry=True, counts="replayed") as session, torch.no_grad():
        model(**BATCH, use_cache=False)
    assert np.array_equal(session.expert_counts_LE(), count_assignments(trace, [0] * 3)[0])
    margins_NL = recorded(model, routed, margins=True).margins_NL()
    assert (margins_NL >= 0).all()
    assert np.isfinite(margins_NL).all()


def test_padding_is_spread_evenly_over_the_experts_of_each_layer():
    model = uneven()
    routed = hf.attach(model)
    batch = batch_of(61, 1)
    trace, given = random_routes(routed.spec, batch), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, args, output: given.append(output[2]))
    with routed.replay(trace, padding="spread"), torch.no_grad():
        model(**batch, use_cache=False)
    for ids, (num_experts, top_k) in zip(given, routed.spec.sizes, strict=True):
        padding = ids[~batch["attention_mask"].bool().reshape(-1)]
        assert padding.shape == (60, top_k)
        assert np.ptp(np.bincount(padding.flatten(), minlength=num_experts)) == 0
        assert all(len({*row}) == top_k for row in padding.tolist())


@pytest.mark.slow
def test_a_compiled_model_is_obedient_too():
    model = uneven(experts="grouped_mm")
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    logits = []
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        with routed.replay(trace), routed.record() as recording, torch.no_grad():
            logits.append(call(**BATCH, use_cache=False).logits)
        assert recording.trace().equals(trace)
    assert torch.equal(*logits)


def test_a_trace_of_other_sizes_is_refused_and_an_auxiliary_loss_that_cannot_count_says_so():
    model = uneven([(8, 2), (8, 3), (8, 1)], router_aux_loss_coef=0.1)  # which upstream counts with one K for all
    routed = hf.attach(model)
    sizes = list(routed.spec.sizes)
    other = fr.RoutingSpec.of_sizes(routed.spec.layers, [sizes[0], (7, 3), sizes[2]])
    with pytest.raises(SpecMismatchError, match="other experts or picks"), routed.replay(random_routes(other, BATCH)):
        pass
    trace = random_routes(routed.spec, BATCH)
    with pytest.raises(ReplayError, match='replay with counts="native"'), routed.replay(trace, counts="replayed"):
        model(**BATCH, output_router_logits=True, labels=BATCH["input_ids"])
