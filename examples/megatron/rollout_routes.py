"""Routes of rollouts, found by their tokens: for the loop of Megatron-LM's train_rl.py, whose batches are bare tensors.

To be copied to megatron/rl/rollout_routes.py; README.md beside it has the lines that call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from foreroute import RoutingTrace, layout, trace
from foreroute.adapters import megatron
from foreroute.adapters.megatron import RoutedMegatron

Key = tuple[int, ...]


class RolloutRoutes:
    """What rollouts brought, and the sessions that replay it.

    Attributes:
        known: the trace of every sequence, by its tokens; None has the model route by itself.
    """

    known: dict[Key, RoutingTrace] | None = None
    _routed: RoutedMegatron | None = None
    _pad = -1

    def remember(self, model: Any, rollouts: Iterable[Any], pad: int) -> None:
        """Take the routes of a collection in place of those before. A collective call of the pipeline stages.

        Args:
            model: that is trained; attached when it comes first.
            rollouts: with `trajectory`, tokens of each turn, and `routes`, integers [T - 1, layers, K] of each.
            pad: token that fills sequences up.
        """
        RouterReplay.clear_global_router_replay_action()  # Megatron's engine leaves it recording
        if self._routed is None:
            self._routed = megatron.attach(model)
        self._pad, self.known = pad, {}
        for rollout in rollouts:
            for tokens, routes in zip(rollout.trajectory, rollout.routes, strict=True):
                one = RoutingTrace.from_sequences(self._routed.spec, [np.array(tokens)], [np.array(routes)])
                self.known[self._key(tokens)] = one

    def replayed(self, tokens: Tensor, packed: Any) -> AbstractContextManager[Any]:
        """A session on the routes of a batch.

        Args:
            tokens: integers [1, T], of all context ranks.
            packed: Megatron's PackedSeqParams, which says where sequences are.

        Raises:
            KeyError: for a sequence that nobody brought routes for.
        """
        if self.known is None:
            return nullcontext()
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        keys = [(self._key(tokens[0, first:end].tolist()), end - first) for first, end in pairwise(ends.tolist())]
        keys = [(key, slots) for key, slots in keys if key]
        if not keys or self._routed is None:
            return nullcontext()  # padding alone
        found = trace.concatenate([self.known[key] for key, _ in keys])
        whole = layout.pack(found.lengths, padded_lengths=[slots for _, slots in keys]).align_total(tokens.shape[1])
        return self._routed.replay(found, whole)

    def _key(self, tokens: Sequence[int]) -> Key:
        """The tokens without padding behind them, which may be the token that ends a response."""
        length = len(tokens)
        while length and tokens[length - 1] == self._pad:
            length -= 1
        return tuple(tokens[:length])
