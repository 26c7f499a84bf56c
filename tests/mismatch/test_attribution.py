"""Roots, consequences and parts of k3 beside loops and an integral; masks of other tokens, and streams, beside sets."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from foreroute import RoutedLayer
from foreroute.errors import InputError
from foreroute.mismatch import root_mismatch, split_k3, token_mismatch
from foreroute.mismatch.decisions import misplaced_masks, stream_difference
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import SAMPLING, DecisionStream, RoutingSpec, RoutingTrace
from tests.traces import random_trace, spec_of


def logprobs(seed, off=0.3):
    rng = np.random.default_rng(seed)
    engine = -rng.exponential(1.5, 200) - 2
    replayed = engine + off * rng.standard_normal(200)
    return replayed + off * rng.standard_normal(200), replayed, engine


@pytest.mark.parametrize("off", [1e-9, 0.3])
def test_the_parts_of_k3_are_integrals_along_the_way_from_engine_to_trainer(off):
    """Of d k3 / d log r = r - 1, where both parts grow at one pace."""
    native, replayed, engine = logprobs(0, off)
    found = split_k3(native, replayed, engine)
    steps = (np.arange(1000) + 0.5) / 1000
    slopes = np.expm1(steps[:, None] * (native - engine)).mean(0)
    assert found.routing_sum == pytest.approx(((native - replayed) * slopes).sum(), rel=1e-3)
    assert found.rest_sum == pytest.approx(((replayed - engine) * slopes).sum(), rel=1e-3)
    assert found.routing + found.rest == pytest.approx(token_mismatch(native, engine).k3, rel=1e-12)
    parts = [split_k3(*(each[part] for each in (native, replayed, engine))) for part in (slice(0, 70), slice(70, 200))]
    whole = parts[0] + parts[1]
    assert (whole.count, whole.routing_sum) == (found.count, pytest.approx(found.routing_sum))
    native, _, engine = logprobs(1)
    assert split_k3(native, engine, engine).routing_share == pytest.approx(1)
    assert split_k3(native, native, engine).routing_share == pytest.approx(0)
    assert np.isnan([split_k3(engine, engine, engine).routing_share, split_k3([], [], []).routing]).all()
    far = split_k3(np.full(3, -1.0), np.full(3, -2.0), np.full(3, -900.0))
    assert np.isfinite([far.routing_sum, far.rest_sum]).all()


def test_roots_and_consequences_are_those_of_a_loop():
    engine, native, own = (random_trace(3, route_seed=seed) for seed in (3, 9, 10))
    rng = np.random.default_rng(0)
    shape = engine.expert_ids_NLK.shape[:2]
    keep = rng.random((*shape, 1)) < 0.5
    kept = np.where(keep, engine.expert_ids_NLK, native.expert_ids_NLK)
    native = replace(native, expert_ids_NLK=kept)
    deficits = rng.exponential(1, shape) * [0, 1, 1]  # all ties in one layer
    found = root_mismatch(engine, native, own, deficits_NL=deficits)
    roots, consequences, listed = np.zeros(shape[1], int), np.zeros(shape[1], int), []
    for row, layer in np.ndindex(shape):
        if engine.valid_N[row] and native.valid_N[row]:
            theirs, would, took = (set(each.expert_ids_NLK[row, layer].tolist()) for each in (engine, native, own))
            roots[layer] += theirs != would
            consequences[layer] += theirs == would and theirs != took
            if theirs != would:
                s = int(np.searchsorted(engine.offsets, row, side="right")) - 1
                place = (s, row - engine.offsets[s], layer)
                listed.append((deficits[row, layer], place, sorted(theirs - would), sorted(would - theirs)))
    assert found.roots_L.tolist() == roots.tolist()
    assert found.consequences_L.tolist() == consequences.tolist()
    assert found.share == roots.sum() / (found.rows * shape[1])
    deficit, place, of_engine, of_trainer = max(listed)
    worst = found.worst[0]
    assert (worst.deficit, worst[:3], worst.engine, worst.trainer) == (deficit, place, of_engine, of_trainer)
    assert found.median == np.median([each[0] for each in listed if each[0]]), "exact ties say nothing of it"
    for roots_L, steep in (([4, 20, 4], [(1, 5.0)]), ([4, 19, 4], []), ([0, 16, 0], [(1, 16.0)]), ([1, 15, 1], [])):
        assert replace(found, distinct_L=np.array(roots_L)).steep == steep


def test_copies_of_a_root_say_it_once():
    """As samples of one prompt have them: 20 copies of four roots would make a layer steep, and a batch of 80."""
    engine = synthetic_trace(spec_of(), [6, 5], seed=3)
    ids = engine.expert_ids_NLK.copy()
    ids[1:5, 1] = (ids[1:5, 1] + 1) % 8
    deficits = np.random.default_rng(0).exponential(1, ids.shape[:2])
    copies = np.tile(np.arange(2), 20)
    rows = np.concatenate([np.arange(*engine.offsets[s : s + 2]) for s in copies])
    sides = engine, replace(engine, expert_ids_NLK=ids)
    one = root_mismatch(*sides, deficits_NL=deficits)
    many = root_mismatch(*(each.select(copies) for each in sides), deficits_NL=deficits[rows])
    assert [each.tolist() for each in (one.roots_L, many.roots_L, many.distinct_L)] == [
        [0, 4, 0],
        [0, 80, 0],
        [0, 4, 0],
    ]
    assert (many.median, many.threshold, many.steep, many.far) == (one.median, np.inf, [], ())
    # the same picks behind other texts, and where no text is known, as of arrays
    for tokens_N in (np.arange(len(rows)), np.zeros(len(rows))):
        apart = [replace(each.select(copies), token_ids_N=tokens_N.astype(np.int32)) for each in sides]
        found = root_mismatch(*apart, deficits_NL=deficits[rows])
        assert (found.distinct_L.tolist(), found.steep) == ([0, 80, 0], [(1, 80.0)])


def test_what_stands_far_out_is_told_by_the_batch_alone():
    """The same in any unit."""
    engine, native = (random_trace(3, num_layers=12, route_seed=seed) for seed in (3, 9))
    deficits = np.random.default_rng(0).exponential(1, engine.expert_ids_NLK.shape[:2])
    root = root_mismatch(engine, native, deficits_NL=deficits).worst[0]
    row = int(engine.offsets[root.sequence]) + root.position
    for unit in (1e-3, 1.0, 50.0):
        assert root_mismatch(engine, native, deficits_NL=unit * deficits).far == ()
        planted = unit * deficits
        planted[row, root.layer] = 40 * unit
        (far,) = root_mismatch(engine, native, deficits_NL=planted).far
        assert far[:3] == root[:3]
    with pytest.raises(InputError, match=r"expected .*\[N, L\]"):
        root_mismatch(engine, native, deficits_NL=deficits[:-1])


VOCABULARY = 500
SPEC = RoutingSpec(4, 2, (RoutedLayer(0),))


def rollout(seed=0, lengths=(12, 9, 12), prompts=3):
    """A trace with a set of 2 to 6 tokens for each token behind the prompts."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCABULARY, n) for n in lengths]
    trace = RoutingTrace.from_sequences(SPEC, tokens, [np.tile([0, 1], (n - 1, 1, 1)) for n in lengths])
    sets = [[] for _ in range(trace.num_rows)]
    for first, own in zip(trace.offsets, tokens, strict=False):
        for row in range(prompts - 1, len(own) - 1):
            others = rng.choice(VOCABULARY, rng.integers(1, 6), replace=False)
            sets[int(first) + row] = sorted({int(own[row + 1]), *others.tolist()})
    return trace, sets


def misplaced(trace, sets):
    counts, ids = np.array([len(each) for each in sets]), np.array([*chain(*sets)], int)
    stream = DecisionStream.from_sets(VOCABULARY, counts > 0, counts, ids)
    return misplaced_masks(trace.with_stream(SAMPLING, stream))


def test_masks_of_other_tokens_are_told_with_the_first():
    trace, sets = rollout()
    assert misplaced(trace, sets) == misplaced_masks(trace) == ""
    swapped = sets[21:33] + sets[12:21] + sets[:12]
    wrong = [row for row, own in enumerate(swapped) if own and trace.token_ids_N[row + 1] not in own]
    said = misplaced(trace, swapped)
    seen = "sets leave out the token that was sampled, the first at position"
    assert said.startswith(f"{len(wrong)} of 24 {seen} {wrong[0]} of sequence 0")


def test_streams_are_compared_set_by_set():
    depth, rng = 3, np.random.default_rng(3)
    layers = tuple(map(RoutedLayer, range(depth)))
    drawn = []
    for _ in range(2):
        valid = rng.random(40) < 0.7
        sets = [[rng.choice(6, rng.integers(0, 4) * v, replace=False).tolist() for _ in range(depth)] for v in valid]
        counts = np.array([[len(each) for each in row] for row in sets])
        ids = np.array([i for row in sets for each in row for i in each], int)
        drawn.append((valid, sets, DecisionStream.from_sets(6, valid, counts, ids, layers=layers)))
    (valid_a, sets_a, a), (valid_b, sets_b, b) = drawn
    found = stream_difference(a, b)
    differing, shares, first = 0, [], None
    for row in range(40):
        differs = valid_a[row] != valid_b[row]
        if valid_a[row] and valid_b[row]:
            pairs = [
                (set(x) or set(range(6)), set(y) or set(range(6)))
                for x, y in zip(sets_a[row], sets_b[row], strict=True)
            ]
            shares += [len(x & y) / len(x | y) for x, y in pairs]
            differs = any(x != y for x, y in pairs)
            differing += differs
        if differs and first is None:
            first = row
    assert found.rows == (valid_a & valid_b).sum()
    assert (found.differing, found.first) == (differing, first)
    assert found.alone == ((valid_a & ~valid_b).sum(), (valid_b & ~valid_a).sum())
    assert found.shared == pytest.approx(np.mean(shares))
    same = stream_difference(a, a)
    assert (same.differing, same.alone, same.first, same.shared) == (0, (0, 0), None, 1.0)
