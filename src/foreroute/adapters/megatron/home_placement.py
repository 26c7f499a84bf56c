"""Tokens of a MoE layer go where its experts live, while that is not where Megatron puts them.

A router goes on in logical experts: its weights, bias, counters and losses, what is recorded and what is replayed. Its
map and its weights have a column for each expert. The columns are put in the order of the ranks' local experts where
the MoE layer gives them to its dispatcher.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.discover import ChunkRouter, objection_to_output
from foreroute.adapters.megatron.home_checkpoints import ExpertsCheckpoint
from foreroute.errors import PlacementError


class DispatchPermutation:
    """Stands for `preprocess` of one MoE layer, on the instance, while its experts are not where Megatron puts them."""

    def __init__(self, site: ChunkRouter, home_E: NDArray[np.int16]) -> None:
        # the expert-parallel rank of every expert; a rank has its own in ascending order
        self.home_E = home_E
        self._site = site
        self._preprocess = site.block.preprocess
        # the logical expert of each local expert, those of rank 0 first
        self._order_E = torch.from_numpy(np.argsort(home_E, kind="stable"))
        self._checkpoint = ExpertsCheckpoint(site, home_E)
        site.block.__dict__["preprocess"] = self

    def __call__(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Dispatch as `MoELayer.preprocess` does, by `probs` and a bool `routing_map` [N, E] in order of experts."""
        if objection := objection_to_output(self._site, probs, routing_map):
            raise PlacementError(f"{objection}. Homes cannot be moved in this configuration")
        if self._order_E.device != probs.device:
            self._order_E = self._order_E.to(probs.device)
        in_order = probs.index_select(1, self._order_E), routing_map.index_select(1, self._order_E)
        return self._preprocess(hidden_states, *in_order)

    def remove(self) -> None:
        del self._site.block.__dict__["preprocess"]
        self._checkpoint.remove()


def permutation_of(site: ChunkRouter) -> DispatchPermutation | None:
    found = site.block.__dict__.get("preprocess")
    return found if isinstance(found, DispatchPermutation) else None


def set_home(site: ChunkRouter, home_E: NDArray[np.int16], block_home_E: NDArray[np.int16]) -> None:
    """Have a layer send tokens to these homes, int16 [E], where Megatron has built its experts at `block_home_E`."""
    before = permutation_of(site)
    if before is not None:
        before.remove()
    if not np.array_equal(home_E, block_home_E):
        DispatchPermutation(site, home_E)
