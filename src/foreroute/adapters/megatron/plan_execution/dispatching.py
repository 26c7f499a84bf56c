"""Megatron's dispatchers, built for columns, and told the counts that they would ask the other ranks for."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from foreroute.adapters.megatron.plan_execution.columns import CellColumns


class PlannedDispatcher:
    """A dispatcher of the class that a MoE layer has, with a column for each slot of each rank.

    Args:
        plain: the layer's own, with a column for each expert; it stays as it is.
        num_slots: P, redundant slots of each rank.

    Attributes:
        dispatcher: Megatron's, built anew.
    """

    def __init__(self, plain: Any, num_slots: int) -> None:
        width = plain.num_local_experts + num_slots
        first = plain.ep_group.rank() * width
        # one of its own: losses of the router go on counting E experts
        config = copy.copy(plain.config)
        config.num_moe_experts = plain.ep_size * width
        groups = SimpleNamespace(ep=plain.ep_group, expt_tp=plain.tp_group, tp_ep=plain.tp_ep_group)
        self.dispatcher: Any = type(plain)(
            width, list(range(first, first + width)), config=config, pg_collection=groups
        )
        if plain.shared_experts is not None:
            self.dispatcher.set_shared_experts(plain.shared_experts)
        self._exchange = getattr(self.dispatcher, "preprocess", None)

    def expect(self, columns: CellColumns | None) -> None:
        """Take the counts of the next dispatch from here; None has the ranks exchange them, as Megatron does.

        The all-gather dispatcher needs no counts: it gathers the maps of all ranks.
        """
        if type(self.dispatcher) is not MoEAlltoAllTokenDispatcher:
            return
        known = self._exchange if columns is None else lambda routing_map: self._set_counts(columns)
        self.dispatcher.__dict__["preprocess"] = known

    def _set_counts(self, columns: CellColumns) -> Tensor:
        """What stands where `preprocess` of the dispatcher does. Returns the rows of each slot here, on the host."""
        dispatcher, sent_GS, received_GS = self.dispatcher, columns.sent_GS, columns.received_GS
        dispatcher.num_out_tokens = int(sent_GS.sum())
        dispatcher.input_splits, dispatcher.output_splits = sent_GS.sum(1), received_GS.sum(1)
        dispatcher.output_splits_tp = None
        # kernels that permute take it from the device, those that split from the host
        counts = torch.from_numpy(np.ascontiguousarray(received_GS))
        dispatcher.num_global_tokens_per_local_expert = (
            counts.to(dispatcher.permute_idx_device, non_blocking=True)
            if dispatcher.config.moe_permute_fusion
            else counts
        )
        dispatcher.cuda_sync_point = "no_sync"
        return torch.from_numpy(received_GS.sum(0))
