"""The routes of one micro-batch, found for its forwards on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.megatron.forward_args import Call, differing, require_fits
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.plan_execution import PlanExecution
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.core.late_checks import LateChecks
from foreroute.errors import BatchMismatchError
from foreroute.replay import Counts, PassRoutes, ReplayRows, to_device


class MicroBatchRoutes:
    """The routes of one micro-batch on one rank.

    Args:
        versions: weight versions of the routed rows, ascending.
        cut: gives those of this rank when the first forward begins: one shard, or one for each side that the batch may
            be padded on.
        hooks: of the chunks.
        counts: which selection is to be counted.
        execution: the one in force when a forward begins, or None.
        checks: of its tokens.
    """

    def __init__(
        self,
        versions: tuple[int, ...],
        cut: Callable[[Call], list[RouteShard]],
        hooks: Sequence[ChunkHooks],
        counts: Counts,
        execution: Callable[[], PlanExecution | None],
        checks: LateChecks,
    ) -> None:
        self.versions = versions
        self._cut = cut
        self._hooks = hooks
        self._counts = counts
        self._execution = execution
        self._checks = checks
        self._shards: list[RouteShard] = []

    def of_pass(self, chunk: int, call: Call) -> PassRoutes:
        """Cut the routes, compare the tokens, and move the chunk's part to the device. See `Routes`.

        Where tokens alone tell the side of padding, the device takes the rows of one of two shards.
        """
        if call.inference is not None:
            raise BatchMismatchError(
                "the forward runs with an inference context; replay whole sequences, without a key-value cache"
            )
        shards = self._shards = self._shards or self._cut(call)
        hooks, execution = self._hooks[chunk], self._execution()
        micro_step = execution.begin_pass(chunk, shards[0]) if execution is not None and hooks.layers else None
        is_last = self._is_last_that_fits(call)
        drops = bool(hooks.trunk.post_process) and any(shard.dropped_C is not None for shard in shards)
        rows = None
        if hooks.layers:
            how: dict[str, Any] = {"mask_padding": hooks.counts_all_ranks, "counts": self._counts}
            rows, *others = (s.rows(hooks.layers, call.device, micro_step=micro_step, **how) for s in shards)
            if is_last is not None:
                rows = _either(rows, others[0], is_last)
        return PassRoutes(rows, partial(_loss_mask, shards, is_last, call), drops)

    def close(self) -> None:
        """What a device was asked is looked at. See `Routes`."""
        self._checks.close()

    def _is_last_that_fits(self, call: Call) -> Tensor | None:
        """Bool [] on the device, whether the second of two shards is meant; None of one. Other tokens are told later.

        On the CPU they are refused at once.
        """
        tokens, shards = call.input_ids, self._shards
        if tokens is None:
            return None
        if tokens.numel() != len(shards[0].tokens_C):
            raise BatchMismatchError(
                f"the model is given {tokens.numel()} slots on this rank and the layout has "
                f"{len(shards[0].tokens_C)}; lay the routes out as the batch is padded or packed"
            )
        wrong_S = torch.stack([torch.cat(differing(call, shard)).any() for shard in shards])
        self._checks.add(wrong_S.all(), partial(require_fits, call.kept(), shards))
        if tokens.device.type == "cpu":
            self._checks.wait()
        return wrong_S[0] if len(shards) > 1 else None


def _either(first: ReplayRows, last: ReplayRows, is_last: Tensor) -> ReplayRows:
    """The rows of one of two shards that differ in nothing else than where the rows are."""
    pairs = {each.name: (getattr(first, each.name), getattr(last, each.name)) for each in fields(first)}
    chosen: dict[str, Any] = {
        name: torch.where(is_last, b, a) for name, (a, b) in pairs.items() if isinstance(a, Tensor)
    }
    return replace(first, **chosen)


def _loss_mask(shards: Sequence[RouteShard], is_last: Tensor | None, call: Call) -> Tensor:
    """Bool [B, T] on the device, the tokens that belong in the loss; B is 1 where the stage is given no tokens."""
    batch = 1 if call.input_ids is None else len(call.input_ids)
    masks = [to_device(shard.counted_C, call.device).view(-1, batch).T for shard in shards]
    return masks[0] if is_last is None else torch.where(is_last, masks[1], masks[0])
