"""Made-up routes with the statistics of real ones: skewed popularity, topics, and likeness of neighbouring tokens.

Each pick is one of the K highest of E scores: how popular the expert is in its layer, how well it suits the topic of
the sequence, and a token's own part, an AR(1) process along the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace import RoutingSpec, RoutingTrace

ZIPF_EXPONENT = 0.57
TOPIC_SCALE = 0.6


def synthetic_trace(
    spec: RoutingSpec,
    lengths: Sequence[int],
    *,
    seed: int,
    correlation: float = 0.7,
    complete: bool = False,
    weight_version: int = 0,
    vocabulary: int = 50_000,
) -> RoutingTrace:
    """Make sequences of random tokens with synthetic routes.

    At E = 128 and K = 8 a token shares 4.5 of its 8 experts with the one before it at `correlation` 0.7, and 2.1 at 0.

    Args:
        spec: the model.
        lengths: tokens of each sequence.
        seed: same seed, same trace (for one version of numpy).
        correlation: of a token's own scores with those of the token before it, from 0 to below 1.
        complete: whether the last token of each sequence is routed as well.
        weight_version: stamped on all routed rows.
        vocabulary: token ids are below it.

    Raises:
        TraceContentError: when `correlation` is out of range.
    """
    if not 0 <= correlation < 1:
        raise TraceContentError(f"correlation is {correlation}; expected 0 <= correlation < 1")
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocabulary, length) for length in lengths]
    rows = [max(0, length - (not complete)) for length in lengths]
    ids_TSLK = _routes(spec, len(rows), max(rows, default=0), correlation, rng)
    routes = [ids_TSLK[:count, s] for s, count in enumerate(rows)]
    return RoutingTrace.from_sequences(
        spec, tokens, routes, weight_version=weight_version, provenance={"source": "synthetic"}
    )


def _routes(
    spec: RoutingSpec, num_sequences: int, num_rows: int, correlation: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    shape = (num_sequences, spec.num_layers, spec.num_experts)
    by_rank = -ZIPF_EXPONENT * np.log(np.arange(1, spec.num_experts + 1))
    popularity = rng.permuted(np.tile(by_rank, (spec.num_layers, 1)), axis=-1)
    lasting = (popularity + TOPIC_SCALE * rng.standard_normal(shape)).astype(np.float32)
    own = rng.standard_normal(shape, dtype=np.float32)
    ids = np.zeros((num_rows, num_sequences, spec.num_layers, spec.top_k), spec.id_dtype)
    for num_experts, _, at in spec.layers_by_size:
        lasting[:, at, num_experts:] = -np.inf
    for row in range(num_rows):
        scores = lasting + own
        top = np.argpartition(-scores, spec.top_k - 1, axis=-1)[..., : spec.top_k]
        order = np.argsort(-np.take_along_axis(scores, top, axis=-1), axis=-1)
        ids[row] = np.take_along_axis(top, order, axis=-1)
        # AR(1) with a variance of 1 at every row, whatever the correlation
        fresh = rng.standard_normal(shape, dtype=np.float32)
        own = np.float32(correlation) * own + np.float32(np.sqrt(1 - correlation**2)) * fresh
    ids[..., ~spec.is_pick_LK] = spec.filler
    return ids
