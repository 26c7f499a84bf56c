"""Realistic routes, natural mismatch, and every defect planted in them, one at a time."""

from dataclasses import replace

import numpy as np

from foreroute import RoutedLayer, RoutingSpec
from foreroute.testing.routes import synthetic_trace


def top_picks(scores, top_k):
    return np.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]


def swapped(rng, ids, spec, rate_L):
    """`ids` with one pick of a router replaced by an expert it did not pick, at the given rate for each layer."""
    ids = ids.copy()
    rows, layers = np.nonzero(rng.random(ids.shape[:2]) < rate_L)
    scores = rng.random((len(rows), spec.num_experts))
    np.put_along_axis(scores, ids[rows, layers].astype(np.int64), -1, axis=-1)
    ids[rows, layers, rng.integers(0, spec.top_k, len(rows))] = scores.argmax(axis=-1)
    return ids


def case(seed):
    """A reference trace: E 8 to 256, K 1 to 8, L 2 to 12, several sequences, the last token of each unrouted."""
    rng = np.random.default_rng(seed)
    experts = int(rng.choice([8, 16, 32, 64, 128, 256]))
    top_k = int(rng.integers(1, min(8, experts // 2) + 1))
    first = int(rng.choice([0, 0, 1, 3]))
    layers = int(rng.integers(2, 13))
    spec = RoutingSpec(experts, top_k, tuple(RoutedLayer(first + i) for i in range(layers)))
    lengths = rng.integers(20, 120, int(rng.integers(3, 9)))
    if rng.random() < 0.2:
        lengths[:] = lengths[0]
    return rng, synthetic_trace(spec, lengths, seed=seed, correlation=rng.uniform(0, 0.7), weight_version=3)


def natural(rng, trace, limit=0.15):
    """`trace` as another engine would see it: up to `limit` of the routers have one expert swapped."""
    ids = swapped(rng, trace.expert_ids_NLK, trace.spec, rng.uniform(0, limit))
    return with_ids(trace, ids)


def with_ids(trace, ids):
    ids = np.where(trace.valid_N[:, None, None], ids, 0).astype(trace.spec.id_dtype)
    return replace(trace, expert_ids_NLK=ids)


def garbage(rng, trace, rows):
    """Rows that mean nothing: random picks, or the same filler in all of them."""
    spec = trace.spec
    if rng.random() < 0.5:
        return np.broadcast_to(np.arange(spec.top_k), (rows, spec.num_layers, spec.top_k))
    return top_picks(rng.random((rows, spec.num_layers, spec.num_experts)), spec.top_k)


def moved(rng, trace, source):
    """Row n takes the routes of row `source[n]`, garbage where that is -1 or was never routed."""
    ids = garbage(rng, trace, trace.num_rows).copy()
    found = (source >= 0) & trace.valid_N[source]
    ids[found] = trace.expert_ids_NLK[source[found]]
    return with_ids(trace, ids)


def places(trace):
    return np.repeat(np.arange(len(trace)), trace.lengths), trace.positions_N


def shift(rng, trace):
    n = int(rng.choice([-5, -3, -2, -1, 1, 2, 3, 8]))
    sequence, position = places(trace)
    inside = (position - n >= 0) & (position - n < trace.lengths[sequence])
    return moved(rng, trace, np.where(inside, np.arange(trace.num_rows) - n, -1)), {"tokens": n}


def permutation(rng, trace):
    order = rng.permutation(len(trace))
    while (order == np.arange(len(trace))).all():
        order = rng.permutation(len(trace))
    sequence, position = places(trace)
    if rng.random() < 0.5 and (trace.lengths[order] != trace.lengths).any():  # packed so
        source = np.concatenate([np.arange(trace.offsets[t], trace.offsets[t + 1]) for t in order])
        return moved(rng, trace, source), {"order": order.tolist()}
    other = order[sequence]
    inside = position < trace.lengths[other]
    return moved(rng, trace, np.where(inside, trace.offsets[other] + position, -1)), {"order": order.tolist()}


def flattening(rng, trace):
    sequence, position = places(trace)
    width = int(trace.lengths.max())
    width = int(rng.choice([width, -(-width // 8) * 8, -(-width // 64) * 64]))
    grid = np.full((len(trace), width), -1)
    grid[sequence, position] = np.arange(trace.num_rows)
    if rng.random() < 0.5:  # written batch-first, read sequence-first
        source = grid.reshape(width, len(trace)).T[sequence, position]
        return moved(rng, trace, source), {"written": "batch-first"}
    source = grid.T.reshape(len(trace), width)[sequence, position]
    return moved(rng, trace, source), {"written": "sequence-first"}


def layer_offset(rng, trace):
    layers, first = trace.spec.num_layers, trace.spec.layers[0].index
    choices = [d for d in (-3, -2, -1, 1, 2, 3, first) if d and abs(d) < layers]
    d = int(rng.choice(choices))
    ids = garbage(rng, trace, trace.num_rows).copy()
    held, origin = slice(max(d, 0), layers + min(d, 0)), slice(max(-d, 0), layers - max(d, 0))
    ids[:, held] = trace.expert_ids_NLK[:, origin]
    return with_ids(trace, ids), {"layers": d, "dense_first": first > 0 and abs(d) == first}


def layer_order(rng, trace):
    """Two layers have changed places, or all of them are stacked in the order of their numbers as text."""
    layers = trace.spec.num_layers
    order = np.arange(layers)
    if layers > 10 and rng.random() < 0.5:
        order = np.array(sorted(range(layers), key=str))
    else:
        two = rng.choice(layers, 2, replace=False)
        order[two] = order[two[::-1]]
    return with_ids(trace, trace.expert_ids_NLK[:, order]), {"order": order.tolist()}


def physical_ids(rng, trace):
    spec = trace.spec
    slots = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    ids = slots[np.arange(spec.num_layers)[:, None], trace.expert_ids_NLK]
    return with_ids(trace, ids), {}


def prefix_missing(rng, trace):
    rows = int(rng.integers(4, trace.lengths.max() // 2))
    _, position = places(trace)
    if rng.random() < 0.5:
        valid = trace.valid_N & (position >= rows)
        ids = np.where(valid[:, None, None], trace.expert_ids_NLK, 0)
        return replace(trace, valid_N=valid, expert_ids_NLK=ids), {"absent": True}
    source = np.where(position < rows, -1, np.arange(trace.num_rows))
    return moved(rng, trace, source), {"absent": False, "rows": rows}


def weight_version(rng, trace):
    layers = trace.spec.num_layers
    rate = np.linspace(rng.uniform(0.15, 0.3), rng.uniform(0.5, 0.9), layers)
    ids = trace.expert_ids_NLK
    for strength in (1.0, 0.5, 0.25):  # some routers lose more than one expert
        ids = swapped(rng, ids, trace.spec, rate * strength)
    return with_ids(trace, ids).with_weight_version(4), {"a": (3,), "b": (4,)}


def layer_replaced(rng, trace):
    layer = int(rng.integers(0, trace.spec.num_layers))
    ids = trace.expert_ids_NLK.copy()
    ids[:, layer] = garbage(rng, trace, trace.num_rows)[:, 0]
    return with_ids(trace, ids), {"row": layer}
