"""Who serves what in one cell, in a form that every method can be put into, ours and the baselines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.step_plan import CellPlan


@dataclass(frozen=True, eq=False)
class Assignment:
    """All hosts of all experts in one cell. H hosts, each an (expert, rank) pair.

    Attributes:
        expert_H: int32 [H].
        rank_H: int32 [H].
        tokens_HG: int64 [H, G], assignments of source rank g to this expert that this host serves. Over the hosts of
            an expert they add up to the cell's counts.
        fetched_H: bool [H], the weights must be moved to this rank before the cell.
    """

    expert_H: NDArray[np.int32]
    rank_H: NDArray[np.int32]
    tokens_HG: NDArray[np.int64]
    fetched_H: NDArray[np.bool_]

    @classmethod
    def of(cls, cell: CellPlan, counts_GE: NDArray[np.integer]) -> Assignment:
        """Homes and replicas of a planned cell."""
        num_experts = len(cell.home_E)
        return cls(
            np.concatenate([np.arange(num_experts), cell.expert_R]).astype(np.int32),
            np.concatenate([cell.home_E, cell.rank_R]).astype(np.int32),
            np.concatenate([cell.home_tokens_GE(counts_GE).T, cell.tokens_RG]),
            np.concatenate([np.zeros(num_experts, np.bool_), cell.fetched_R]),
        )

    @property
    def loads_G(self) -> NDArray[np.int64]:
        """int64 [G], assignments that each rank serves."""
        loads_G = np.zeros(self.tokens_HG.shape[1], np.int64)
        np.add.at(loads_G, self.rank_H, self.tokens_HG.sum(axis=1))
        return loads_G
