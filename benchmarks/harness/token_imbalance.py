"""Workloads W0 to W7 of Megatron-LM's token-imbalance benchmark, and its oracle.

After NVIDIA/Megatron-LM pull request 7488 (open; issue 6757 calls for it), as its files stand at commit f5c50249. From
there: the experts that a token may pick in each workload, how picks follow from (workload, seed, step), and the checks
of the oracle.

Three things are a reading. There all ranks get the same tokens, in W4 too, though W4 is described as uneven sources;
here W4's tokens are dealt so that rank g has 2 (g + 1) / (G (G + 1)) of them. A step there is a micro-step here, and a
workload has one layer. The oracle sends rows through the schedule that executors index, where theirs runs Megatron's
dispatcher; of its checks those of gradients and losses are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.errors import ConfigError
from foreroute.plan import CellPlan
from foreroute.plan.schedule import CellSchedule

Ints = NDArray[np.int64]

WORKLOADS = {
    "W0_balanced": "every expert in turn",
    "W1_hot_expert_set": "three tokens of four pick from the first quarter of the experts",
    "W2_hot_rank": "the same, drawn otherwise; contiguous homes put the hot experts on few ranks",
    "W3_spread_hot_experts": "three tokens of four pick from every other expert",
    "W4_source_ragged": "all experts alike, ranks with uneven numbers of tokens",
    "W5_zero_expert_rank": "the first half of the experts is never picked",
    "W6_rotating_hotspot": "as W1, and the hot quarter moves on every third step",
    "W7_burst": "every other token of each fourth step picks from the first quarter, all else is drawn from all",
}


@dataclass(frozen=True)
class Setting:
    """Sizes of a workload: experts, picks of a token, tokens of a rank in a step, and ranks."""

    num_experts: int
    top_k: int
    tokens: int
    num_ranks: int


@cache
def routes(name: str, num_experts: int, top_k: int, tokens: int, step: int, seed: int) -> Ints:
    """Draw one step of a workload: int64 [T, K], distinct experts of every token.

    Raises:
        ConfigError: when there is no such workload, or it has fewer experts than picks to choose from.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"no workload is called {name}; known are {', '.join(WORKLOADS)}")
    # the pull request's own derivation of a seed, which its published loads follow from
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{name}|{seed}|{step}".encode()).hexdigest()[:8], 16))
    hot, everyone = torch.tensor(_hot(name, num_experts, top_k, step)), torch.arange(num_experts)
    pools = [hot if _is_hot(name, step, token) else everyone for token in range(tokens)]
    if (fewest := min(map(len, pools), default=0)) < top_k:
        raise ConfigError(f"{name} picks {top_k} of {fewest} experts; expected as many to pick from at least")
    if name == "W0_balanced":
        ids_TK = torch.arange(tokens * top_k).view(tokens, top_k) % num_experts
    else:
        picks = [pool[torch.randperm(len(pool), generator=generator)[:top_k]] for pool in pools]
        ids_TK = torch.stack(picks).sort(dim=1).values
    found: Ints = ids_TK.numpy()
    return found


def _hot(name: str, num_experts: int, top_k: int, step: int) -> list[int]:
    """List the experts that a hot token picks from."""
    width = max(top_k, num_experts // 4)
    if name == "W3_spread_hot_experts":
        spread = sorted({2 * i % num_experts for i in range(max(top_k, num_experts // 2))})
        return spread if len(spread) >= top_k else list(range(num_experts))
    if name == "W5_zero_expert_rank":
        return list(range(num_experts // 2, num_experts))
    first = step // 3 * width if name == "W6_rotating_hotspot" else 0
    return [(first + i) % num_experts for i in range(width)]


def _is_hot(name: str, step: int, token: int) -> bool:
    if name in ("W0_balanced", "W4_source_ragged"):
        return False
    if name == "W7_burst":
        return step % 4 == 3 and token % 2 == 0
    return name == "W5_zero_expert_rank" or token % 4 != 0


def sources(name: str, tokens: int, num_ranks: int) -> NDArray[np.int32]:
    """Give the rank of each token of a group, int32 [T * G]; the tokens of `routes` follow each other G times."""
    shares_G = np.arange(1, num_ranks + 1) if name == "W4_source_ragged" else np.ones(num_ranks, np.int64)
    ends_G = np.cumsum(shares_G) * tokens * num_ranks // shares_G.sum()
    return np.repeat(np.arange(num_ranks, dtype=np.int32), np.diff(ends_G, prepend=0))


def step_counts(name: str, setting: Setting, steps: Sequence[int], seed: int = 1234) -> NDArray[np.int32]:
    """Count so many steps: int32 [M, 1, G, E]."""
    size = setting.num_experts, setting.top_k, setting.tokens
    source_T = sources(name, setting.tokens, setting.num_ranks)
    return np.stack(
        [
            counted(np.tile(routes(name, *size, step, seed), (setting.num_ranks, 1)), source_T, setting)[None]
            for step in steps
        ]
    )


def counted(ids_TK: Ints, source_T: NDArray[np.integer], setting: Setting) -> NDArray[np.int32]:
    """Count the tokens of one cell: int32 [G, E]."""
    counts_GE = np.zeros((setting.num_ranks, setting.num_experts), np.int32)
    np.add.at(counts_GE, (source_T[:, None], ids_TK), 1)
    return counts_GE


def failed_checks(cell: CellPlan, ids_TK: Ints, source_T: NDArray[np.integer], setting: Setting) -> list[str]:
    """Name the checks of the oracle that a planned cell fails; whole numbers, compared exactly.

    Every rank's rows are sent as its schedule says, given back as they came, and returned; then the rows of a token's
    picks add up to K times the token.
    """
    sorted_TK = np.sort(ids_TK, axis=1)
    checks = {
        "distinct_topk_ok": bool((sorted_TK[:, 1:] > sorted_TK[:, :-1]).all()),
        "id_range_ok": bool((ids_TK >= 0).all() and (ids_TK < setting.num_experts).all()),
    }
    if not all(checks.values()):
        return [name for name, holds in checks.items() if not holds]
    counts_GE = counted(ids_TK, source_T, setting)
    ranks = [CellSchedule.of(cell, counts_GE, rank) for rank in range(setting.num_ranks)]
    tokens = [np.flatnonzero(source_T == rank) for rank in range(setting.num_ranks)]
    rows_TD = np.arange(4 * len(ids_TK)).reshape(-1, 4)  # no two tokens alike
    order = [np.argsort(ids_TK[here].ravel(), kind="stable") for here in tokens]
    taken = [by_expert[_index(rank.send_segments)] for by_expert, rank in zip(order, ranks, strict=True)]
    sent = [rows_TD[here[pick // setting.top_k]] for here, pick in zip(tokens, taken, strict=True)]
    received = list(_exchanged(sent, [rank.send_G for rank in ranks]))
    none = np.zeros((1, rows_TD.shape[1]), np.int64)  # a row beyond those received is padding
    served = [
        np.concatenate([rows, none])[np.minimum(_index(rank.expert_segments), len(rows))]
        for rows, rank in zip(received, ranks, strict=True)
    ]
    given = [rows[_index(rank.return_segments)] for rows, rank in zip(served, ranks, strict=True)]
    back = _exchanged(given, [rank.receive_G for rank in ranks])
    sums_TD = np.zeros_like(rows_TD)
    for here, pick, rows in zip(tokens, taken, back, strict=True):
        np.add.at(sums_TD, here[pick // setting.top_k], rows)
    checks = {
        "global_histogram_exact": int(counts_GE.sum()) == len(ids_TK) * setting.top_k,
        "local_counts_sum_ok": all(
            len(rows) == int(rank.group_rows_S.sum()) for rows, rank in zip(served, ranks, strict=True)
        ),
        "recv_splits_assignments_ok": [int(rank.receive_G.sum()) for rank in ranks] == cell.loads_G(counts_GE).tolist(),
        "roundtrip_exact": np.array_equal(sums_TD, setting.top_k * rows_TD),
    }
    return [name for name, holds in checks.items() if not holds]


def _index(segments: Ints) -> Ints:
    """List the rows of segments, each a first row and a length."""
    return np.concatenate([np.arange(first, first + length) for first, length in segments] or [np.zeros(0, np.int64)])


def _exchanged(rows_G: Sequence[Ints], sizes_G: Sequence[Ints]) -> Iterator[Ints]:
    """Exchange rows as an all-to-all does: give what each rank gets when all send so many rows to each."""
    pieces = [np.split(rows, np.cumsum(sizes)[:-1]) for rows, sizes in zip(rows_G, sizes_G, strict=True)]
    for target in range(len(rows_G)):
        yield np.concatenate([piece[target] for piece in pieces])
