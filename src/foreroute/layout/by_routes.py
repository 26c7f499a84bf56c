"""Packing by routes: which sequences share a micro-step, so that experts at their homes are level. Compiled.

A micro-step counts once for each expert-parallel group here: M are those of all groups, W = M * G their bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array
from foreroute.errors import LayoutError
from foreroute.kernels import BOOL, FLOAT, INT, ArrayOf, StructOf, compiled

MOST_DEARER = 0.005
"""Most growth of the dearest ranks' attention over all micro-steps, as a share; and of tokens of the longest."""
WORK = 300_000_000
"""Most numbers of ranks' loads that a search looks at: 0.3 s of one core."""
TRIES = 32
"""Looks of a search at each pair of a small step."""
LANES = 8
"""Layers of a block, as in C++."""


@dataclass(frozen=True)
class PackingCertificate:
    """Balance of a packing by routes, and the bound of any packing at these homes. In assignments.

    Attributes:
        bound: no packing of these sequences has a lower sum: of each layer, the rank that gets most in the whole step,
            by the number of groups.
        slowest: the sum over micro-steps and layers of the slowest rank, in the group that has most.
        by_length: the same of the packing that sequences were exchanged in, by length or as it was handed in.
        attention: the sum over micro-steps of the dearest rank outside of experts, over that of the same packing.
    """

    bound: int
    slowest: int
    by_length: int
    attention: float

    @property
    def over_bound(self) -> float:
        """Ratio of the slowest ranks to the bound: 1.0 is the bound."""
        return self.slowest / self.bound if self.bound else 1.0


def pack_by_routes(
    counts: ArrayLike,  # integers [S, L, E], assignments of each sequence
    homes: ArrayLike | None,  # integers [L, E], the rank of each expert in its group; None: blocks of experts
    bin_S: NDArray[np.int64],  # to begin with, micro-step * ranks of all groups + rank
    tokens_S: NDArray[np.int64],
    cost_S: NDArray[np.float64],  # attention
    *,
    num_micro_steps: int,  # of each group
    num_ranks: int,  # of all groups
    token_budget: int | None,  # None: what the fullest bin holds
    groups: int = 1,
    stay: bool = False,  # sequences stay on their rank; experts may be on another number of ranks then
    padded: bool = False,  # sequences take as much as the longest one of their bin
) -> tuple[NDArray[np.int64], PackingCertificate]:
    """Return the bin of each sequence as `bin_S` has them, and the certificate."""
    num_bins, ranks = num_micro_steps * num_ranks, num_ranks // groups
    rows_S = _rows_by_rank(counts, homes, tokens_S, ranks, stay)
    found_S, size = bin_S.copy(), len(tokens_S)
    held_W, dear_W = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.float64)
    for total_W, each_S in ((held_W, tokens_S), (dear_W, cost_S)):
        (np.maximum if padded else np.add).at(total_W, bin_S, each_S)
        if padded:
            total_W *= np.bincount(bin_S, minlength=num_bins)
    fullest = int(held_W.argmax())
    if token_budget is not None and held_W[fullest] > token_budget:
        micro_step, rank = divmod(fullest, num_ranks)
        raise LayoutError(
            f"micro-step {micro_step} of rank {rank} holds {held_W[fullest]} tokens and the budget is {token_budget}; "
            "leave the budget out, so that none gets more than the fullest has"
        )
    dearest_M = dear_W.reshape(-1, ranks).max(axis=1)
    dearest = float(dearest_M.sum())
    longest_M = held_W.reshape(-1, ranks).max(axis=1)
    order_S = np.lexsort((tokens_S, bin_S % num_ranks)) if stay else np.argsort(tokens_S, kind="stable")
    spot_S = np.empty(size, np.int64)
    spot_S[order_S] = np.arange(size)
    load_M = np.zeros((num_bins // ranks, *rows_S.shape[1:]), np.int32)
    slowest_2M = np.zeros((2, len(load_M)), np.int64)
    alike = -(-size // ranks) if stay else size  # sequences that one may be exchanged for
    window = max(1, min(alike, max(16, alike // 4)))
    bins = SimpleNamespace(  # what a search goes by; see by_routes.cpp
        bin_S=found_S,
        order_S=order_S,
        spot_S=spot_S,
        tokens_S=tokens_S,
        cost_S=cost_S,
        held_W=held_W,
        dear_W=dear_W,
        dearest_M=dearest_M,
        longest_M=longest_M,
        most_dear=(1 + MOST_DEARER) * dearest,
        most_long=int((1 + MOST_DEARER) * longest_M.sum()),
        token_budget=int(held_W[fullest]) if token_budget is None else token_budget,
        window=window,
        work=min(WORK, TRIES * size * min(size, 2 * window) * load_M[0].size),
        ranks=ranks,
        padded=padded,
        stay=stay,
    )
    _exchange(bins, rows_S, load_M, slowest_2M)
    before_G, after_G = slowest_2M.reshape(2, num_micro_steps, groups).sum(axis=1)
    if groups > 1:
        after_G = _level_groups(found_S, slowest_2M[1], groups, ranks)
    attention = float(dear_W.reshape(-1, ranks).max(axis=1).sum()) / dearest if dearest else 1.0
    # a search that is cut short may end above where it began
    if after_G.max() > before_G.max():
        found_S, after_G, attention = bin_S, before_G, 1.0
    bound = int(load_M.sum(axis=0, dtype=np.int64).max(axis=1).sum())
    certificate = PackingCertificate(
        bound=-(-bound // groups),
        slowest=int(after_G.max()),
        by_length=int(before_G.max()),
        attention=attention,
    )
    return found_S, certificate


def _rows_by_rank(
    counts: ArrayLike, homes: ArrayLike | None, tokens_S: NDArray[np.int64], num_ranks: int, any_ranks: bool
) -> NDArray[np.int32]:
    """Check counts and homes, and sum what each rank's experts get of a sequence: int32 [S, blocks, G, `LANES`]."""
    counts_SLE = as_array(counts, name="counts", error=LayoutError)
    if counts_SLE.dtype.kind not in "iu" or counts_SLE.ndim != 3 or len(counts_SLE) != len(tokens_S):
        raise LayoutError(
            f"counts are {counts_SLE.dtype} of shape {list(counts_SLE.shape)}; expected integers [S, L, E], those of "
            f"each of the {len(tokens_S)} sequences (foreroute.plan.sequence_counts)"
        )
    _, num_layers, num_experts = counts_SLE.shape
    if not num_layers or not num_experts:
        raise LayoutError(f"counts have {num_layers} layers of {num_experts} experts; expected at least one of each")
    # a token picks an expert once: counts of other sequences, or in another order, mostly break this
    wrong = (counts_SLE < 0).any(axis=(1, 2)) | (counts_SLE.max(axis=(1, 2)) > tokens_S)
    for s in np.flatnonzero(wrong)[:1]:
        raise LayoutError(
            f"counts of sequence {s} go from {counts_SLE[s].min()} to {counts_SLE[s].max()}, and it has {tokens_S[s]} "
            "tokens, which pick an expert once at most; expected counts of these sequences in this order"
        )
    if int(counts_SLE.sum(axis=(0, 2), dtype=np.int64).max()) > MOST_INT32:
        raise LayoutError(f"a layer has more than {MOST_INT32} assignments; pack the step in parts")
    if homes is None:
        if num_experts % num_ranks:
            raise LayoutError(f"{num_experts} experts are no equal blocks on {num_ranks} ranks; pass homes")
        home_LE = np.tile(np.arange(num_experts) // (num_experts // num_ranks), (num_layers, 1))
    else:
        home_LE = as_array(homes, name="homes", error=LayoutError)
    if home_LE.dtype.kind not in "iu" or home_LE.shape != (num_layers, num_experts):
        raise LayoutError(
            f"homes are {home_LE.dtype} of shape {list(home_LE.shape)}; expected integers "
            f"[{num_layers}, {num_experts}], the layers and experts of the counts"
        )
    if any_ranks:
        num_ranks = int(home_LE.max()) + 1
    if home_LE.min() < 0 or home_LE.max() >= num_ranks:
        raise LayoutError(
            f"homes go from {home_LE.min()} to {home_LE.max()}; expected ranks of a group, 0 to {num_ranks - 1}"
        )
    rows_S = np.zeros((len(tokens_S), -(-num_layers // LANES), num_ranks, LANES), np.int32)
    _sum_rows(np.ascontiguousarray(counts_SLE, np.int32), np.ascontiguousarray(home_LE, np.int64), rows_S)
    return rows_S


def _level_groups(bin_S: NDArray[np.int64], slowest_M: NDArray[np.int64], groups: int, ranks: int) -> NDArray[np.int64]:
    """Give whole micro-steps to groups, as many to each, so that their sums are level; return these sums."""
    # groups meet at the end of the step alone, so that a micro-step may be of any of them
    group_M = np.arange(len(slowest_M)) % groups
    sum_G = np.bincount(group_M, slowest_M, groups).astype(np.int64)
    while True:
        slowest = int(sum_G.argmax())
        give = np.flatnonzero(group_M == slowest)
        more_MM = slowest_M[give, None] - slowest_M
        after_MM = np.maximum(sum_G[slowest] - more_MM, sum_G[group_M] + more_MM)
        after_MM[:, give] = sum_G[slowest]
        m, n = np.unravel_index(int(after_MM.argmin()), after_MM.shape)
        if after_MM[m, n] >= sum_G[slowest]:
            break
        sum_G[[slowest, group_M[n]]] += np.array([-more_MM[m, n], more_MM[m, n]])
        group_M[[give[m], n]] = group_M[[n, give[m]]]
    moved_M = np.empty(len(slowest_M), np.int64)
    moved_M[np.argsort(group_M, kind="stable")] = np.arange(len(slowest_M)).reshape(-1, groups).T.ravel()
    bin_S[:] = moved_M[bin_S // ranks] * ranks + bin_S % ranks
    return sum_G


_READ, _FILLED = ArrayOf(np.int64, 1), ArrayOf(np.int64, 1, filled=True)
_ROWS = ArrayOf(np.int32, 4, filled=True)
_sum_rows = compiled("rows_by_rank", ArrayOf(np.int32, 3), ArrayOf(np.int64, 2), _ROWS)
_exchange = compiled(
    "exchange_sequences",
    StructOf(
        bin_S=_FILLED,
        order_S=_READ,
        spot_S=_READ,
        tokens_S=_READ,
        cost_S=ArrayOf(np.float64, 1),
        held_W=_FILLED,
        dear_W=ArrayOf(np.float64, 1, filled=True),
        dearest_M=ArrayOf(np.float64, 1, filled=True),
        longest_M=_FILLED,
        most_dear=FLOAT,
        most_long=INT,
        token_budget=INT,
        window=INT,
        work=INT,
        ranks=INT,
        padded=BOOL,
        stay=BOOL,
    ),
    _ROWS,
    _ROWS,
    ArrayOf(np.int64, 2, filled=True),
)
