"""Models whose layers differ in experts and picks, beyond what sessions of every kind of gate are asked."""

import pytest
import torch

import foreroute as fr
from foreroute.adapters import hf
from foreroute.errors import ReplayError, SpecMismatchError
from tests.adapters.hf import family_checks
from tests.adapters.hf.families import FAMILIES, Family
from tests.adapters.hf.family_checks import CHECKS
from tests.adapters.hf.model_runs import batch_of, random_routes, uneven
from tests.tiers import grid

PICKS = [1, 3, 2]
BATCH = batch_of(9, 6, 4)


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


@pytest.mark.exhaustive
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
    with pytest.raises(SpecMismatchError, match=r"experts.*picks"), routed.replay(random_routes(other, BATCH)):
        pass
    trace = random_routes(routed.spec, BATCH)
    with pytest.raises(ReplayError, match=r"replay.*counts"), routed.replay(trace, counts="replayed"):
        model(**BATCH, output_router_logits=True, labels=BATCH["input_ids"])
