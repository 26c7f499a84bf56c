"""A fingerprint that binds routes to the tokens and the weights they were computed from."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from foreroute.trace.container import RoutingTrace


def digest(trace: RoutingTrace) -> str:
    """BLAKE2b-128 over model facts, sequence bounds, tokens, weight versions, validity and routes, as hex.

    Provenance, the model's name and the codec of a file do not take part: the same routes have the same digest wherever
    they came from. Whether pick order is kept does: a trace read from an order-dropping file has the digest of
    `trace.without_pick_order()`, which is another one than that of the recorded trace.
    """
    state = hashlib.blake2b(digest_size=16)
    spec = trace.spec
    layers = [[layer.index, layer.kind.value] for layer in spec.layers]
    facts = [spec.num_experts, spec.top_k, layers, trace.pick_order_kept]
    state.update(json.dumps(facts).encode())
    for array in (
        trace.offsets,
        trace.token_ids_N,
        trace.weight_versions_N,
        trace.valid_N,
        np.ascontiguousarray(trace.expert_ids_NLK),
    ):
        state.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
    return state.hexdigest()
