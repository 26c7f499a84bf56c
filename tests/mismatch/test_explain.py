"""The explainer on 200 seeded cases of each planted defect, and on 200 clean pairs, of which few run by day."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import BatchMismatchError, InputError, SpecMismatchError
from foreroute.mismatch import Defect, explain
from foreroute.testing.routes import synthetic_trace
from tests.mismatch import planted_defects as planted

SEEDS = [
    range(8),
    pytest.param(range(8, 40), marks=pytest.mark.slow),
    pytest.param(range(40, 200), marks=pytest.mark.exhaustive),
]
PLANTED = {
    Defect.SHIFT: planted.shift,
    Defect.PERMUTATION: planted.permutation,
    Defect.FLATTENING: planted.flattening,
    Defect.LAYER_OFFSET: planted.layer_offset,
    Defect.PHYSICAL_IDS: planted.physical_ids,
    Defect.PREFIX_MISSING: planted.prefix_missing,
    Defect.WEIGHT_VERSION: planted.weight_version,
    Defect.LAYER_REPLACED: planted.layer_replaced,
    Defect.LAYER_ORDER: planted.layer_order,
}
OF_MANY_LAYERS = {Defect.LAYER_REPLACED}
"""Of two layers nobody can say which is right."""


@functools.cache
def clean_pair(seed):
    """A reference and the same routes with natural mismatch."""
    rng, reference = planted.case(seed)
    return reference, planted.natural(rng, reference)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("defect", PLANTED)
def test_planted_defects_are_named(defect, seeds):
    for seed in seeds:
        reference, other = clean_pair(seed)
        if defect in OF_MANY_LAYERS and reference.spec.num_layers < 3:
            continue
        broken, expected = PLANTED[defect](np.random.default_rng([seed, 1]), other)
        found = explain(reference, broken)
        assert found.defect is defect, (seed, found.sentence)
        for name, value in expected.items():
            assert found.parameters[name] == value, (seed, name, found.sentence)


@pytest.mark.parametrize("seeds", SEEDS)
def test_clean_pairs_raise_no_alarm(seeds):
    for seed in seeds:
        found = explain(*clean_pair(seed))
        assert found.defect is Defect.NONE, (seed, found.sentence)
        assert found.overlap_by_layer_L.mean() > 0.84


def test_overlaps_by_layer_and_position_match_a_loop():
    reference, other = clean_pair(1)
    found = explain(reference, other)
    spec, per_layer, per_position = reference.spec, {}, {}
    for s in range(len(reference)):
        for p in range(int(reference.lengths[s]) - 1):
            n = int(reference.offsets[s]) + p
            for layer in range(spec.num_layers):
                sets = [set(t.expert_ids_NLK[n, layer].tolist()) for t in (reference, other)]
                share = len(sets[0] & sets[1]) / spec.top_k
                per_layer.setdefault(layer, []).append(share)
                per_position.setdefault(p, []).append(share)
    assert np.allclose(found.overlap_by_layer_L, [np.mean(per_layer[layer]) for layer in range(spec.num_layers)])
    assert np.allclose(found.overlap_by_position_T[:-1], [np.mean(per_position[p]) for p in sorted(per_position)])
    assert np.isnan(found.overlap_by_position_T[-1])
    assert found.differing == pytest.approx(np.mean([x < 1 for xs in per_layer.values() for x in xs]))


def test_broad_difference_without_a_pattern_is_unexplained():
    reference, _ = clean_pair(4)
    rng = np.random.default_rng(4)
    flat = planted.with_ids(reference, planted.swapped(rng, reference.expert_ids_NLK, reference.spec, 0.5))
    assert explain(reference, flat).defect is Defect.UNEXPLAINED
    assert explain(reference, flat.with_weight_version(4)).defect is Defect.WEIGHT_VERSION
    scores = rng.random((reference.num_rows, reference.spec.num_layers, reference.spec.num_experts))
    noise = planted.with_ids(reference, planted.top_picks(scores, reference.spec.top_k))
    assert explain(reference, noise).defect is Defect.UNEXPLAINED


def test_edges():
    reference, other = clean_pair(5)
    assert explain(reference, reference).sentence.startswith("Both have the same experts")
    assert explain(reference, other).sentence.startswith("Natural mismatch")
    assert explain(reference.select([0]), other.select([0])).defect is Defect.NONE
    # first rows that differ are a prefix from fifteen routers on
    for sequences, layers, defect in ((5, 3, Defect.PREFIX_MISSING), (7, 2, Defect.NONE)):
        spec = fr.RoutingSpec(8, 2, tuple(map(fr.RoutedLayer, range(layers))))
        trace = synthetic_trace(spec, [20] * sequences, seed=0)
        ids = trace.expert_ids_NLK.copy()
        ids[trace.offsets[:-1]] = (ids[trace.offsets[:-1]] + 1) % 8
        assert explain(trace, planted.with_ids(trace, ids)).defect is defect


def test_no_rows_other_tokens_and_other_models_are_refused():
    """They would show no difference."""
    trace, _ = clean_pair(5)
    of_another = replace(trace, spec=fr.RoutingSpec(999, 1, (fr.RoutedLayer(0),)))
    unrouted = replace(trace, valid_N=np.zeros_like(trace.valid_N))
    for error, other in (
        (InputError, unrouted),
        (BatchMismatchError, trace.select([0])),
        (SpecMismatchError, of_another),
    ):
        with pytest.raises(error):
            explain(trace, other)
