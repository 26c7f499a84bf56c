"""The places of a plan, for kernels that send a token by numbers of experts and know nothing of replicas.

They are told P places on each of G ranks in place of E experts. Place `rank * P + group` is a rank's home expert or its
replica, numbered as in `CellSchedule`, and a pick is rewritten from its expert to the place that serves it.

A assignments of this rank, S segments, V replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.plan.hosts import CellPlan
from foreroute.replay.rows import joined_to_device


class Places(NamedTuple):
    """The places of one cell, seen from this rank."""

    num_local: int  # P
    place_A: Tensor  # int64, on the device, of the assignments sorted by expert, stable
    sent_G: list[int]  # assignments of every rank, to whatever rank
    num_home_rows: int  # that home experts here compute


def upload_places(
    device: torch.device,
    cells: Sequence[CellPlan],
    counts_CGE: Sequence[NDArray[np.integer]],
    rank: int,
    num_local: int,
) -> list[Places]:
    """Bring the places of several cells to the device, in one copy. The host does not wait for it."""
    home_rows_CGE = [cell.home_tokens_GE(counts_GE) for cell, counts_GE in zip(cells, counts_CGE, strict=True)]
    segments = [
        _segments(cell, home_GE[rank], rank, num_local) for cell, home_GE in zip(cells, home_rows_CGE, strict=True)
    ]
    sizes = [int(rows_S2[:, 1].sum()) for rows_S2 in segments]
    place, length = joined_to_device(segments, device).unbind(1)
    # with the size of the output, repeat_interleave does not ask the device for it
    places = place.repeat_interleave(length, output_size=sum(sizes)).split(sizes)
    return [
        Places(num_local, place_A, counts_GE.sum(axis=1).tolist(), int(home_GE[:, cell.home_E == rank].sum()))
        for cell, place_A, counts_GE, home_GE in zip(cells, places, counts_CGE, home_rows_CGE, strict=True)
    ]


def _segments(cell: CellPlan, home_rows_E: NDArray[np.int64], rank: int, num_local: int) -> NDArray[np.int64]:
    """Return int64 [S, 2], place and rows: of each expert its home and its replicas in ascending order of rank."""
    num_experts, num_replicas = len(cell.home_E), len(cell.expert_R)
    num_home = num_experts // cell.tokens_RG.shape[1]
    place = np.empty(num_experts + num_replicas, np.int64)
    by_home_E = np.argsort(cell.home_E, kind="stable")
    place[by_home_E] = cell.home_E[by_home_E].astype(np.int64) * num_local + np.arange(num_experts) % num_home
    by_slot_V = np.lexsort((cell.slot_R, cell.rank_R))
    rank_V = cell.rank_R[by_slot_V].astype(np.int64)
    number_V = np.arange(num_replicas) - np.searchsorted(rank_V, rank_V)
    place[num_experts + by_slot_V] = rank_V * num_local + num_home + number_V
    rows = np.concatenate([home_rows_E, cell.tokens_RG[:, rank]])
    expert = np.concatenate([np.arange(num_experts), cell.expert_R])
    in_order = np.lexsort((np.concatenate([np.full(num_experts, -1), cell.rank_R]), expert))
    return np.stack([place[in_order], rows[in_order]], axis=1)
