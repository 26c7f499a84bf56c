"""Captures that look like one that failed in silence: every id is possible, and together they cannot be true."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import CaptureError, shown
from foreroute.trace import LayerKind, RoutingSpec, RoutingTrace
from foreroute.trace.checks import place_of

MIN_ROWS, MIN_TOKENS = 32, 8
"""Rows one after the other, and distinct input tokens among them, before a layer that stays with one set counts as
frozen. Chosen by hand: a short prompt may well go to one set of experts in a trained model's first layer, and a
repeated token may everywhere."""
CERTAIN = 30.0
"""Bits: what a healthy router does with a chance below 2^-30. A router that sends a token to a set of experts sends the
next, another token to the same set with a chance of at most 2^-min(K, E - K), one half for each pick that it is free
in; Mixtral keeps its first pick in 28 % of cases (arXiv 2401.04088, table 5). Where the layer has the set in a share of
the other rows, as a collapsed router has, the chance is that share. Tokens that come again are no new evidence: d
distinct tokens on one set have d - 1 times as many bits as a pair. So top-8 of 128 needs 8 tokens, top-1 31, and K = E,
which has one set, none are enough."""
ROWS_AT_ONCE = 4096
UNFREEZE = "Run the engine without CUDA graphs (enforce_eager=True, --disable-cuda-graph), or take a newer one."


def unfilled_lookups(rows_RLK: NDArray[Any], spec: RoutingSpec, *, what: str) -> NDArray[np.bool_]:
    """Say in which layers a sequence has nothing but zeros because they look experts up by token, bool [L].

    Engines may leave these out. Any other such layer is a buffer that was never filled.

    Args:
        rows_RLK: [R, L, K], the routed rows of one sequence.
        spec: E and the layer table.
        what: names the sequence.

    Raises:
        CaptureError: when another layer is, or all are.
    """
    zero_L = ~rows_RLK.any(axis=(0, 2)) & bool(len(rows_RLK))
    if not zero_L.any():
        return zero_L
    lookup_L = zero_L & np.array([layer.kind is LayerKind.HASH for layer in spec.layers])
    # With one pick, zeros are a possible route to expert 0; a capture full of them is not.
    if spec.top_k > 1:
        is_wrong = zero_L.all() or (zero_L & ~lookup_L).any()
    else:
        is_wrong = zero_L.all() and zero_L.size * len(rows_RLK) >= 8 and spec.num_experts > 1
    if is_wrong:
        wrong_table = (
            "" if zero_L.all() else ". If the layer is dense, the model's layers are stated wrong: pass its own"
        )
        raise CaptureError(
            f"{what} has nothing but zeros in {int(zero_L.sum())} of {spec.num_layers} layers (first: "
            f"{spec.layers[int(np.argmax(zero_L))]}); the engine never filled them. Compiled or fused MoE "
            f"paths bypass the capture: try enforce_eager=True, another MoE kernel, or a newer engine{wrong_table}"
        )
    return lookup_L & (spec.top_k > 1)


def refuse_routed_dense(columns_RDK: NDArray[Any], layers: list[int], *, what: str) -> None:
    """Raise `CaptureError` when the column of a dense layer varies: then the layer axis is not the model's.

    Args:
        columns_RDK: [R, D, K], the columns of D layers without a router, which engines leave at one constant.
        layers: their numbers.
        what: names the sequence.
    """
    if not columns_RDK.size:
        return
    varies_D = (columns_RDK != columns_RDK[:1, :, :1]).any(axis=(0, 2))
    if varies_D.any():
        raise CaptureError(
            f"{what} has routes in decoder layer {layers[int(np.argmax(varies_D))]}, which the spec says is dense. The "
            "layer axis is shifted, a draft or MTP layer poses as a decoder layer (switch off its capture, or upgrade "
            "the engine: vLLM 0.26, SGLang 0.5.15), or the engine runs another model (SGLang ignores mlp_only_layers "
            "of Qwen MoE)"
        )


def refuse_frozen_rows(trace: RoutingTrace) -> None:
    """Raise `CaptureError` when a trace has `frozen_rows`."""
    if found := frozen_rows(trace):
        raise CaptureError(
            f"{found}. {UNFREEZE} If the router really has collapsed, build the trace with RoutingTrace.from_sequences"
        )


def frozen_rows(trace: RoutingTrace) -> str:
    """Say where many different tokens have one set of experts, or one token has the row of another: "" where none has.

    Rows are looked at one after the other, from one sequence to the next, and layers one by one. So a layer that never
    changes is found, and an engine that stops to write rows in the middle of one request.
    """
    if not isinstance(trace, RoutingTrace):
        raise CaptureError(f"the trace is {shown(trace)}; expected a RoutingTrace")
    rows = np.flatnonzero(trace.valid_N)
    bits_L = np.array([min(top_k, num_experts - top_k) for num_experts, top_k in trace.spec.sizes_L], np.float64)
    if len(rows) < 2 or not bits_L.any():
        return ""
    sets_RL = _numbers_of_sets(trace, rows)
    tokens_R, same_RL = trace.token_ids_N[rows], sets_RL[1:] == sets_RL[:-1]
    for layer in np.flatnonzero(bits_L):
        runs = [run for run in _runs(same_RL[:, layer]) if run.stop - run.start >= MIN_ROWS]
        alone_R = np.ones(len(rows), np.bool_)
        for run in runs:
            alone_R[run] = False
        for run in runs:
            others = sets_RL[alone_R, layer] == sets_RL[run.start, layer]
            share = others.mean() if len(others) else 0.0
            bits = min(bits_L[layer], -np.log2(share) if share else np.inf)
            tokens = len(np.unique(tokens_R[run]))
            if tokens >= MIN_TOKENS and (tokens - 1) * bits >= CERTAIN:
                ids = sorted(trace.expert_ids_NLK[rows[run.start], layer, : trace.spec.picks_L[layer]].tolist())
                count = run.stop - run.start
                return (
                    f"{_place(trace, rows[run.start])}: {trace.spec.layers[layer]} sends {count} rows, from there on, "
                    f"of {tokens} different tokens to experts {ids}; the capture froze"
                )
    if bits_L.sum() < CERTAIN:
        return ""
    for run in _runs(same_RL[:, bits_L > 0].all(axis=1)):
        differing = np.flatnonzero(tokens_R[run] != tokens_R[run.start])
        if len(differing):
            at = run.start + int(differing[0])
            return (
                f"{_place(trace, rows[at])}: the row of token {tokens_R[at]} is that of token {tokens_R[run.start]} "
                f"before it, in all {trace.spec.num_layers} layers; the engine wrote one row for several tokens"
            )
    return ""


def _numbers_of_sets(trace: RoutingTrace, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a number for the set of each row and layer, uint64 [R, L]: the sum of a random number of each expert.

    Two sets have one number with a chance of 2^-64.
    """
    spec = trace.spec
    of_id = np.random.default_rng(0).integers(1 << 64, size=np.iinfo(spec.id_dtype).max + 1, dtype=np.uint64)
    sets_RL = np.empty((len(rows), spec.num_layers), np.uint64)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        sets_RL[part] = of_id[trace.expert_ids_NLK[rows[part]]].sum(axis=-1, dtype=np.uint64)
    return sets_RL


def _runs(is_same_R: NDArray[np.bool_]) -> list[slice]:
    """Return the rows of each run of two or more that are all the same, where each but the first is said to be."""
    edges = np.flatnonzero(np.diff(is_same_R, prepend=False, append=False))
    return [slice(int(start), int(end) + 1) for start, end in edges.reshape(-1, 2)]


def _place(trace: RoutingTrace, row: int) -> str:
    return "sequence {}, position {}".format(*place_of(row, trace.offsets))
