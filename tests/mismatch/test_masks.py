"""Sampling masks of other tokens are named, and two streams are compared: held against plain Python sets."""

from itertools import chain

import numpy as np
import pytest

from foreroute import RoutedLayer
from foreroute.mismatch.decisions import misplaced_masks, stream_difference
from foreroute.trace import SAMPLING, DecisionStream, RoutingSpec, RoutingTrace

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


def with_sets(trace, sets):
    counts = np.array([len(each) for each in sets])
    ids = np.array([*chain(*sets)], int)
    return trace.with_stream(SAMPLING, DecisionStream.from_sets(VOCABULARY, counts > 0, counts, ids))


def test_masks_of_other_tokens_are_told_with_the_first():
    trace, sets = rollout()
    assert misplaced_masks(with_sets(trace, sets)) == misplaced_masks(trace) == ""
    swapped = sets[21:33] + sets[12:21] + sets[:12]
    wrong = [row for row, own in enumerate(swapped) if own and trace.token_ids_N[row + 1] not in own]
    said = misplaced_masks(with_sets(trace, swapped))
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
