"""Small seeded traces for tests."""

import numpy as np

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace, concatenate
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import INDEXER, DecisionStream
from foreroute.trace.streams import MOST_CHOICES


def spec_of(num_experts=8, top_k=2, num_layers=3):
    return RoutingSpec(num_experts, top_k, tuple(RoutedLayer(i) for i in range(num_layers)), model="test")


def random_trace(seed, *, num_experts=8, top_k=2, num_layers=3, route_seed=None):
    """A few sequences of a few tokens, each without a route for its last token."""
    rng = np.random.default_rng(seed)
    spec = spec_of(num_experts, top_k, num_layers)
    lengths = rng.integers(1, 7, size=rng.integers(1, 5))
    tokens = [rng.integers(0, 50, n) for n in lengths]
    rng = rng if route_seed is None else np.random.default_rng(route_seed)
    routes = [np.argsort(rng.random((n - 1, num_layers, num_experts)), axis=-1)[..., :top_k] for n in lengths]
    return RoutingTrace.from_sequences(spec, tokens, routes, weight_version=int(rng.integers(0, 3)))


def mixed_trace(seed):
    """Samples of shared prompts, then single sequences; gaps, several weight versions, empty sequences."""
    rng = np.random.default_rng(seed)
    spec = spec_of(num_layers=4)
    sizes = rng.integers(10, 60, 3)
    prompts = synthetic_trace(spec, sizes.tolist(), seed=seed, complete=True).select(np.repeat(np.arange(3), 3))
    answers = synthetic_trace(spec, rng.integers(0, 9, 9).tolist(), seed=seed + 1, weight_version=1)
    later = synthetic_trace(spec, rng.integers(0, 9, 9).tolist(), seed=seed + 2, weight_version=2)
    samples = prompts.continued_by(answers).continued_by(later)
    trace = concatenate([samples, random_trace(seed, num_layers=4)])
    return trace.select(rng.permutation(len(trace)))


def random_sets(rng, num_rows, num_choices, *, layers=()):
    """A stream in which some rows decided nothing, and some decisions left nothing out."""
    depth, most = max(1, len(layers)), min(num_choices, 9)
    valid = rng.random(num_rows) < 0.7
    counts = rng.integers(0, most + 1, (num_rows, depth)) * valid[:, None]
    ids = [[0][:0], *(rng.choice(num_choices, n, replace=False) for n in counts.reshape(-1))]
    return DecisionStream.from_sets(num_choices, valid, counts, np.concatenate(ids).astype(int), layers=layers)


def with_decisions(trace, seed):
    """The same trace with two streams: sampling masks, and an indexer's choices in two layers."""
    rng = np.random.default_rng(seed)
    masks, indexers = random_sets(rng, trace.num_rows, 300), (RoutedLayer(0), RoutedLayer(5))
    trace = trace.with_stream("sampling", masks)
    return trace.with_stream("indexer", random_sets(rng, trace.num_rows, 2**31 - 1, layers=indexers))


def drawn_choices(spec, position_N, rng, present=1.0):
    """A stream of random choices at these positions, some of them absent; and the units by (row, layer, head)."""
    valid_N = rng.random(len(position_N)) < present
    counts, ids, sets = [], [], {}
    for row, visible in enumerate(spec.num_visible(position_N).tolist()):
        for layer in range(len(spec.layers)):
            is_part = valid_N[row] and visible > spec.top_k
            counts.append(spec.heads * spec.top_k if is_part else 0)
            for head in range(spec.heads if is_part else 0):
                units = np.sort(rng.choice(visible, spec.top_k, replace=False))
                sets[row, layer, head] = units.tolist()
                ids.append(units * spec.heads + head)
    counts_ND = np.array(counts).reshape(-1, len(spec.layers))
    flat = np.concatenate([np.zeros(0, np.int64), *ids])
    return DecisionStream.from_sets(MOST_CHOICES, valid_N, counts_ND, flat, layers=spec.layers), sets


def foreign_choices(trace, spec, *, seed=3):
    """The same trace with choices of indexers, in all rows, of the right sizes, that no indexer would make."""
    return trace.with_stream(INDEXER, drawn_choices(spec, trace.positions_N, np.random.default_rng(seed))[0])


def uneven_trace(seed, sizes=((8, 2), (300, 3), (5, 1), (8, 2))):
    """Sequences with gaps, of a model whose layers have these experts and picks, each row a random choice."""
    rng = np.random.default_rng(seed)
    spec = RoutingSpec.of_sizes(map(RoutedLayer, range(len(sizes))), sizes, "test")
    tokens, routes = [], []
    for length in rng.integers(0, 9, size=rng.integers(1, 5)):
        ids = np.full((length, spec.num_layers, spec.top_k), -1)
        for layer, (num_experts, top_k) in enumerate(sizes):
            ids[:, layer, :top_k] = np.argsort(rng.random((length, num_experts)), axis=-1)[:, :top_k]
        ids[rng.random(length) < 0.2] = -1
        tokens.append(rng.integers(0, 50, length))
        routes.append(ids)
    return RoutingTrace.from_sequences(spec, tokens, routes, weight_version=int(rng.integers(0, 3)))


def picks_of(trace):
    """The picks of each row, as a list for each layer; None where there is no route."""
    return [
        [ids[:top_k].tolist() for ids, (_, top_k) in zip(row, trace.spec.sizes_L, strict=True)] if there else None
        for row, there in zip(trace.expert_ids_NLK, trace.valid_N, strict=True)
    ]


def sets_of(stream):
    """For each row of a stream None, or a list of ids for each layer."""
    pieces = [piece.tolist() for piece in np.split(stream.ids, stream.offsets[1:-1])] if len(stream.offsets) > 1 else []
    by_row = [pieces[n * stream.depth : (n + 1) * stream.depth] for n in range(stream.num_rows)]
    return [sets if valid else None for sets, valid in zip(by_row, stream.valid_N, strict=True)]
