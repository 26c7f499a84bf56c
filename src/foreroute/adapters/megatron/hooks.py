"""The hooks on one chunk of a Megatron-Core model, its trunk and its routers, for as long as a session is open.

Megatron's router hands its selection to `self.router_replay` where it has one. The hook stands there, on the instance,
while the router runs, and lets `SelectionMode` run the selection, as for every other router. The score function, the
normalisation and the scaling around it stay Megatron's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.forward_args import Call, Share
from foreroute.core.hooks import ModelHooks, RouterHook
from foreroute.core.selection import LayerPass, Selection, SelectionMode
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.replay import ReplayRows
from foreroute.replay.aux_loss_counts import ExecutedCounts

if TYPE_CHECKING:
    from foreroute.ep.execution import ExecutionHolder

OTHER_ORDER = {
    "local_cp_size": "gives every micro-batch a context parallelism of its own; replay takes that of the model. Train "
    "without hybrid context parallelism",
    "tokens_per_sample": "has routers see the samples of a packed batch side by side, and attention one after the "
    "other; leave it unset, or pass the samples as a padded batch",
}
"""Settings of a packed batch by which routers see its rows in an order of their own."""

ACTION = "router_replay_action"
"""Attribute that says what Megatron's own replay of a router does; None while it is switched off."""
BIAS = "_apply_expert_bias"
"""The method by which routers count for their bias."""


class ChunkHooks(ModelHooks):
    """The hooks of what one rank runs in one go, of which a forward is one pass."""

    routers: Sequence[TopKRouterHook]

    def __init__(self, number: int, trunk: Any, sites: Sequence[ChunkRouter], share: Share) -> None:
        super().__init__(number, trunk, [TopKRouterHook(site) for site in sites])
        self.sites = sites
        self.share = share
        self.layers = tuple(site.layer for site in sites)
        # whether a loss counts tokens over data-parallel ranks, which must do it alike whoever of them has padding
        self.counts_all_ranks = any(site.module.get_aux_loss_coeff("global_aux_loss") for site in sites)
        self.counts_native = any(site.module.enable_expert_bias for site in sites)
        self.holder: ExecutionHolder | None = None  # of the plan that is executed; the model, once it is attached
        self._names = list(inspect.signature(type(trunk).forward).parameters)[1:]

    def read_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Find what says where tokens are among the arguments of a call of the trunk, by the names of its forward."""
        trunk: Any = self.trunk
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tokens, padding, packed = given.get("input_ids"), given.get("padding_mask"), given.get("packed_seq_params")
        if tokens is not None and tokens.is_nested:  # verl's, which stages behind the first are handed unpacked
            tokens = None
        if tokens is not None and (tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool):
            raise BatchMismatchError(
                f"input_ids are {tokens.dtype} of shape {tuple(tokens.shape)}; expected integers [batch, tokens]"
            )
        if padding is not None and padding.dtype != torch.bool:
            raise BatchMismatchError(
                f"padding_mask is {padding.dtype}; expected booleans [batch, tokens], True for padding"
            )
        if getattr(packed, "qkv_format", None) in ("sbhd", "bshd"):  # of a padded batch: attention is told of padding
            packed = None
        for name, why in OTHER_ORDER.items():
            if getattr(packed, name, None) is not None:
                raise BatchMismatchError(f"packed_seq_params.{name} {why}")
        # hidden states [T, B, H] are cut as routers see them: of the stage before, or in the place of tokens
        is_first = getattr(trunk, "pre_process", True)
        hidden = given.get("decoder_input") if is_first else trunk.decoder.input_tensor
        if hidden is not None:
            num_router_rows = hidden.shape[0] * hidden.shape[1]
        elif tokens is not None:
            num_router_rows = tokens.numel() // self.share.sp
        else:
            raise ReplayError(
                "a forward of the model was given neither tokens, nor embeddings, nor what the stage before made"
            )
        inference = given.get("inference_context")
        inference = given.get("inference_params") if inference is None else inference
        past = int(getattr(inference, "sequence_len_offset", None) or 0)
        device = next(trunk.parameters()).device
        return Call(tokens, packed, padding, inference, past, num_router_rows, device, self)


class TopKRouterHook(RouterHook):
    """The hook on one router, which stands where Megatron's own replay would."""

    def __init__(self, site: ChunkRouter) -> None:
        router = site.module
        super().__init__(site.path, (router, "forward"), router.num_experts, router.topk)
        self.site = site
        # where groups are limited, two selections of groups come before that of experts
        self._final = 2 if router.config.moe_router_group_topk else 0
        self.by_softmax = router.score_function == "softmax" and router.config.moe_router_pre_softmax
        self._seen: list[Selection] = []

    def select(
        self, now: LayerPass, forward: Callable[..., Any], hidden: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        """Run the router on hidden states [T, B, H]; the mask is bool [T, B], True for padding."""
        router = self.site.module
        # not by `require_idle`: calls of Python count in each layer
        if getattr(router.router_replay, ACTION, None) is not None:
            require_idle(self.site)
        rows = now.rows if isinstance(now.rows, ReplayRows) else None
        if rows is not None and rows.padding_R is not None:
            padding_mask = rows.padding_R.view(hidden.shape[:2])
        self._seen.clear()
        counts = None
        if rows is not None and rows.counts == "replayed" and router.is_aux_loss_enabled():
            sizes = (self.num_experts, self.top_k)
            counts = ExecutedCounts(lambda: self._seen[-1].ids_RK[None] if self._seen else None, sizes)
        own = vars(router)
        before = {"router_replay": own["router_replay"]}
        own["router_replay"] = self
        if router.enable_expert_bias:
            if BIAS in own:
                before[BIAS] = own[BIAS]
            own[BIAS] = partial(self._count_for_bias, router._apply_expert_bias)
        try:
            with counts or nullcontext():
                result = forward(hidden, padding_mask)
        finally:
            own.pop(BIAS, None)
            own.update(before)
        if counts is not None:
            counts.require_counted(has_loss=router.training and torch.is_grad_enabled())
        if len(self._seen) != 1:
            raise ReplayError(
                f"router {self.path} made {len(self._seen)} selections in one forward that could be seen, "
                "expected 1: a fused or replaced selection bypasses replay"
            )
        self._seen.clear()
        return result

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Give scores [R, K] and ids int64 [R, K], as Megatron's router asks its `router_replay` by scores [R, E]."""
        now = self.now
        assert now is not None, "it stands in a router that runs in a pass"
        with SelectionMode(self._final, now) as mode:
            selected = default_compute_topk(scores, topk, num_groups, group_topk)
        for seen in mode.seen[self._final :]:
            if now.margin_into is not None or now.deficit_into is not None:
                now.keep_distances(seen)
            self._seen.append(seen)
        return selected

    def _count_for_bias(
        self, apply: Callable[..., Any], routing_map: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        """Count for the expert bias, without padding."""
        rows = None if self.now is None else self.now.rows
        if isinstance(rows, ReplayRows) and rows.counts == "native" and torch.is_grad_enabled():
            routing_map = torch.zeros_like(routing_map).scatter(1, self._seen[-1].native_RK, True)
        if padding_mask is not None:
            # here, since Megatron's own masking of its counters fails to broadcast
            routing_map = routing_map & ~padding_mask[:, None]
        return apply(routing_map, padding_mask=None)


def require_idle(site: ChunkRouter) -> None:
    """Raise `ReplayError` if Megatron's own router replay is switched on."""
    action = getattr(site.module.router_replay, ACTION, None)
    if action is not None:
        raise ReplayError(
            f"Megatron's own router replay is active at {site.path} ({action}); clear it with "
            "RouterReplay.clear_global_router_replay_action(), two replays cannot drive one router"
        )
