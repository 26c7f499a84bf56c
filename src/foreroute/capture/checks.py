"""Refuses captures of which every id is possible, and which look together like one that failed in silence."""

from __future__ import annotations

import warnings
from math import comb, gcd, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import CaptureError, shown
from foreroute.trace import LayerKind, RoutingSpec, RoutingTrace
from foreroute.trace.checks import place_of, recorded_rows

MIN_ROWS, MIN_TOKENS = 32, 8
"""Rows one after the other, and distinct input tokens among them, before a layer that stays with one set counts as
frozen. Chosen by hand: a short prompt may well go to one set of experts in a trained model's first layer, and a
repeated token may everywhere."""
CERTAIN = 30.0
"""Bits: what a healthy router does with a chance below 2^-30. A router that sends a token to a set of experts is taken
to send another one to the same set with a chance of 2^-min(K, E - K): one half for each pick that it is free in. Where
the rows beside a run have its set in a larger share, as those of a router that has nearly collapsed, or of a text that
one expert is for, the chance is that share. Tokens that come again are no new evidence: d tokens on one set have d - 1
times the bits of two. So with 32 other rows on each side top-8 of 128 takes 11 tokens. K = E, which has one set, is
never judged."""
FREE = 4
"""Bits of a layer that is judged by itself. One of fewer, such as top-1 or top-2, is judged where it never changes in
the whole trace, or all layers stay at once: with random weights it may stay with its picks over a whole text."""
MOST_SHARE = 0.5
"""Share of the rows beside a run from which its layer stays with the set by itself: it has collapsed, or comes to it by
and by, as a model of random weights does over a long text."""
FEW = 4
"""Rows with the set that are added to those beside a run, since a share of 32 rows is known to no more than a tenth."""
LAYER_BITS, SURE = 6.0, 16.0
"""Most bits that count of one layer, and least of all together, by which experts that no layer picks are warned of. A
token of a router that picks four of eight groups of experts first has the same half with a chance of 2^-6."""
ROWS_AT_ONCE = 4096
TAIL = 16
"""Bytes at the end of a row, whose words are compared before all of it: last layers know most of the text before it."""
UNFREEZE = "Run the engine without CUDA graphs (enforce_eager=True, --disable-cuda-graph), or take a newer one."


def unfilled_lookups(
    rows_RLK: NDArray[Any], valid_R: NDArray[np.bool_], spec: RoutingSpec, *, what: str
) -> NDArray[np.bool_]:
    """Find layers of a sequence whose recorded rows are zeros because they look experts up by token: bool [L].

    Engines may leave these out. Any other layer of zeros is a buffer that was never filled, and refused. Rows that are
    not valid, or -1 throughout, were not recorded.
    """
    for first in np.flatnonzero(valid_R)[:1]:  # one row tells nearly always
        if rows_RLK[first].any(axis=1).all() and recorded_rows(rows_RLK[first : first + 1])[0]:
            return np.zeros(spec.num_layers, np.bool_)
    routed_RLK = rows_RLK[valid_R & recorded_rows(rows_RLK)]
    count = len(routed_RLK)
    zero_L = np.asarray(~routed_RLK.any(axis=(0, 2)) & (count > 0))
    if not zero_L.any():
        return zero_L
    lookup_L = zero_L & np.array([layer.kind is LayerKind.HASH for layer in spec.layers])
    # With one pick, zeros are a possible route to expert 0; a capture full of them is not.
    if spec.top_k > 1:
        is_wrong = zero_L.all() or (zero_L & ~lookup_L).any()
    else:
        is_wrong = zero_L.all() and zero_L.size * count >= 8 and spec.num_experts > 1
    if is_wrong:
        wrong_table = (
            "" if zero_L.all() else ". If the layer is dense, the model's layers are stated wrong: pass its own"
        )
        raise CaptureError(
            f"{what} has nothing but zeros in {int(zero_L.sum())} of {spec.num_layers} layers (first: "
            f"{spec.layers[int(np.argmax(zero_L))]}); the engine never filled them. Compiled or fused MoE "
            f"paths bypass the capture: try enforce_eager=True, another MoE kernel, or a newer engine{wrong_table}"
        )
    return np.asarray(lookup_L & (spec.top_k > 1))


def refuse_routed_dense(columns_RDK: NDArray[Any], layers: list[int], *, what: str) -> None:
    """Refuse columns [R, D, K] of the dense `layers` that vary: the layer axis is then not the model's."""
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
    """Say where many different tokens have the same picks, or one token has the row of another: "" where none has."""
    if not isinstance(trace, RoutingTrace):
        raise CaptureError(f"the trace is {shown(trace)}; expected a RoutingTrace")
    rows = np.flatnonzero(trace.valid_N)
    bits_L = np.array([min(top_k, num_experts - top_k) for num_experts, top_k in trace.spec.sizes_L], np.float64)
    if len(rows) < 2 or not bits_L.any():
        return ""
    # Rows are taken one after the other and from one sequence to the next: so a layer that never changes is found, and
    # an engine that stops to write rows in the middle of one request.
    return _same_picks(trace, rows, bits_L) or _same_row(trace, rows, bits_L)


def warn_of_unused_experts(trace: RoutingTrace) -> None:
    """Warn where no layer picks any of the last experts, as under a spec of more experts than the engine's model has.

    Numbers of experts are names: the u of E experts that a layer picks are all among the first m by chance in
    C(m, u) / C(E, u) of all cases.
    """
    num_experts, used = trace.spec.num_experts, 0
    for start in range(0, trace.num_rows, ROWS_AT_ONCE):
        used = max(used, 1 + int(trace.expert_ids_NLK[start : start + ROWS_AT_ONCE].max()))
        if used == num_experts:
            return
    routed_RLK, bits = trace.expert_ids_NLK[trace.valid_N], 0.0
    for layer in range(trace.spec.num_layers):
        picked = len(np.unique(routed_RLK[:, layer]))
        bits += min(log2(comb(num_experts, picked)) - log2(comb(used, picked)), LAYER_BITS)
    if bits >= SURE:
        warnings.warn(
            f"no layer picks an expert above {used - 1} of {num_experts}; unless its last ones are switched off, the "
            "engine's model has fewer: give its own spec, hf.attach(model).spec, or that of its folder",
            stacklevel=4,
        )


def _same_picks(trace: RoutingTrace, rows: NDArray[np.int64], bits_L: NDArray[np.float64]) -> str:
    """Say where a layer, or all at once, repeat their picks in their order, as a buffer does that was not written."""
    stays = _layers_that_stay(trace, rows)
    if not (stays := stays[bits_L[stays] > 0]).size:
        return ""
    picks_RL = _numbers_of_picks(trace, rows)
    tokens_R, chooses = trace.token_ids_N[rows], np.flatnonzero(bits_L)
    for layers in [*stays[:, None], *([chooses] if len(stays) == len(chooses) else [])]:
        bits = bits_L[layers].sum()
        picks_R = picks_RL[:, layers] @ _random_numbers(len(layers), seed=1)
        for run in _long_runs(picks_R[1:] == picks_R[:-1]):
            count, tokens = run.stop - run.start, len(np.unique(tokens_R[run]))
            share = _share_beside(trace, rows, picks_R, run)
            chance = min(bits, -np.log2(share)) if share else bits
            if tokens < MIN_TOKENS or share >= MOST_SHARE or (tokens - 1) * chance < CERTAIN:
                continue
            if bits >= FREE or count == len(rows) or len(layers) == len(chooses):
                ids = trace.expert_ids_NLK[rows[run.start], layers[0], : trace.spec.picks_L[layers[0]]].tolist()
                layer = f"{trace.spec.layers[layers[0]]}{'' if len(layers) == 1 else ', as every layer,'}"
                return (
                    f"{_place(trace, rows[run.start])}: {layer} sends {count} rows, from there on, of {tokens} "
                    f"different tokens to experts {ids}; the capture froze"
                )
    return ""


def _share_beside(trace: RoutingTrace, rows: NDArray[np.int64], picks_R: NDArray[Any], run: slice) -> float:
    """Return the share of rows beside a run with its picks: next to it, or in its sequences, whichever is higher."""
    first, last = (place_of(rows[row], trace.offsets)[0] for row in (run.start, run.stop - 1))
    start, stop = np.searchsorted(rows, trace.offsets[[first, last + 1]]).tolist()
    # where few rows are beside the run, all others are counted; a share of few rows is taken for a higher one
    most, count = 0.0, run.stop - run.start
    for margin in (MIN_ROWS, len(rows)):
        before = picks_R[max(start, run.start - margin) : run.start] == picks_R[run.start]
        behind = picks_R[run.stop : min(stop, run.stop + margin)] == picks_R[run.start]
        parts = [before, behind] if margin == MIN_ROWS else [np.concatenate([before, behind])]
        shares = [(part.sum() + FEW) / (len(part) + FEW) for part in parts if len(part) >= MIN_TOKENS]
        most = max([most, *shares])
        if most >= MOST_SHARE:  # more is not asked
            return float(most)
    return float(most) or float((picks_R == picks_R[run.start]).sum() - count) / max(len(rows) - count, 1)


def _same_row(trace: RoutingTrace, rows: NDArray[np.int64], bits_L: NDArray[np.float64]) -> str:
    """Say where a sequence has the picks of all layers twice, for two tokens."""
    # whole rows, of all layers, stand twice in a sequence only where a token comes again
    certain = CERTAIN + 2 * np.log2(len(rows))  # there are fewer than R^2 pairs of rows
    if bits_L.sum() < certain:
        return ""
    if not (alike := _rows_that_end_alike(trace, rows)).size:
        return ""
    tokens_R, row_R = trace.token_ids_N[alike], _numbers_of_picks(trace, alike) @ _random_numbers(len(bits_L), seed=1)
    sequence_R = np.searchsorted(trace.offsets, alike, side="right")
    order = np.lexsort((tokens_R, row_R, sequence_R))  # rows that are alike, one behind the other
    pairs = np.sort(np.stack([order[:-1], order[1:]]), axis=0)
    is_twice = tokens_R[pairs[0]] != tokens_R[pairs[1]]
    for numbers_R in (sequence_R, row_R):
        is_twice &= numbers_R[pairs[0]] == numbers_R[pairs[1]]
    if not is_twice.any():
        return ""
    # a layer that has a set often has it twice by chance
    picks_LR = _numbers_of_picks(trace, rows).T
    chance_L = [((np.unique(picks_R, return_counts=True)[1] / len(rows)) ** 2).sum() for picks_R in picks_LR]
    if np.minimum(bits_L, -np.log2(chance_L)).sum() < certain:
        return ""
    first, second = pairs[:, is_twice][:, pairs[1, is_twice].argmin()]
    return (
        f"{_place(trace, alike[second])}: the row of token {tokens_R[second]} is that of token {tokens_R[first]} at "
        f"position {trace.positions_N[alike[first]]}, in all {len(bits_L)} layers; the engine wrote a row twice"
    )


def _layers_that_stay(trace: RoutingTrace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find the layers that have the same picks in half of `MIN_ROWS` rows and one, int64: all with a run are here."""
    step, ids_NLK = MIN_ROWS // 2, trace.expert_ids_NLK
    # of `MIN_ROWS` rows two are looked at, and what is between them where they are alike
    seen_RLK = ids_NLK[rows[::step]]
    at, layers = np.divmod(np.flatnonzero(_equal_picks(seen_RLK[1:], seen_RLK[:-1])), trace.spec.num_layers)
    for behind in range(1, step):
        if not len(at):
            break
        first, other = (ids_NLK[rows[step * at + number], layers] for number in (0, behind))
        is_same = _equal_picks(first, other)
        at, layers = at[is_same], layers[is_same]
    return np.unique(layers)


def _rows_that_end_alike(trace: RoutingTrace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find the rows whose last words may be those of another in their sequence, int64: few but where it is so."""
    start = int(rows[0])
    ids_NLK = np.ascontiguousarray(trace.expert_ids_NLK[start:])
    bytes_NB = ids_NLK.view(np.uint8).reshape(len(ids_NLK), -1)
    num_words = min(bytes_NB.shape[1], TAIL) // 8
    words_NW = bytes_NB[:, bytes_NB.shape[1] - 8 * num_words :].view(np.uint64)
    # odd factors lose no bit of a word; einsum takes words that lie apart without a copy
    number_N = np.einsum("nw,w->n", words_NW, _random_numbers(num_words, seed=1) | np.uint64(1))
    number_N += np.repeat(_random_numbers(len(trace), seed=2), trace.lengths)[start:]
    number_R = number_N[trace.valid_N[start:]]
    ascending_R = np.sort(number_R)
    twice = ascending_R[1:][ascending_R[1:] == ascending_R[:-1]]
    # by sorting: NumPy 2.0 makes a table for few numbers, and cannot index it from 2^63 on
    return rows[np.isin(number_R, twice, kind="sort")] if len(twice) else twice.astype(np.int64)


def _equal_picks(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which picks of [..., K] are the same in the same order: bool [...]."""
    # by words that are as wide as they go
    word = f"u{gcd(a.shape[-1] * a.itemsize, 8)}"
    a, b = (np.ascontiguousarray(each).view(word) for each in (a, b))
    equal: NDArray[np.bool_] = a[..., 0] == b[..., 0]
    for number in range(1, a.shape[-1]):
        equal &= a[..., number] == b[..., number]
    return equal


def _numbers_of_picks(trace: RoutingTrace, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a number for the picks of each row and layer, uint64 [R, L]: the sum of a random one of each pick."""
    spec = trace.spec
    # the order of picks counts; other picks have the same number with a chance of 2^-64
    of_pick = _random_numbers(spec.top_k, np.iinfo(spec.id_dtype).max + 1, seed=0)
    picks_RL = np.zeros((len(rows), spec.num_layers), np.uint64)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        ids_RLK = trace.expert_ids_NLK[rows[part]]
        for k in range(spec.top_k):
            picks_RL[part] += of_pick[k, ids_RLK[..., k]]
    return picks_RL


def _random_numbers(*shape: int, seed: int) -> NDArray[np.uint64]:
    """Draw the random numbers that picks stand for."""
    return np.random.default_rng(seed).integers(1 << 64, size=shape, dtype=np.uint64)


def _long_runs(is_same_R: NDArray[np.bool_]) -> list[slice]:
    """Return the runs of `MIN_ROWS` or more, where each row but the first is said to be as the one before."""
    edges = np.flatnonzero(np.diff(is_same_R, prepend=False, append=False)).reshape(-1, 2)
    long = edges[edges[:, 1] - edges[:, 0] >= MIN_ROWS - 1]
    return [slice(start, end + 1) for start, end in long.tolist()]


def _place(trace: RoutingTrace, row: int) -> str:
    """Name the place of a row."""
    return "sequence {}, position {}".format(*place_of(row, trace.offsets))
