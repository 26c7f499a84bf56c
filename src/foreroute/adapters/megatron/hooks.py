"""The hooks on one chunk of a Megatron-Core model, its trunk and its routers, for as long as a session is open.

Megatron's router hands its selection to `self.router_replay` where it has one. The hook stands there, on the instance,
and lets `SelectionMode` run the selection, as for every other router. The score function, the normalisation and the
scaling around it stay Megatron's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.forward_args import Call
from foreroute.adapters.megatron.route_shard import Share
from foreroute.core.hooks import ModelHooks, RouterHook, overridden
from foreroute.core.selection import LayerPass, Selection, SelectionMode
from foreroute.errors import ReplayError
from foreroute.replay import ReplayRows
from foreroute.replay.aux_loss_counts import ExecutedCounts


class ChunkHooks(ModelHooks):
    """The hooks of what one rank runs in one go, of which a forward is one pass.

    Args:
        number: which chunk of its rank this is.
        trunk: the module that takes tokens and owns the decoder.
        sites: the routers of that, if it has any.
        share: of the rows, on this rank.

    Attributes:
        layers: its routed layers.
        counts_all_ranks: whether a loss counts tokens over data-parallel ranks, which must do it alike whoever of them
            has padding.
    """

    routers: Sequence[TopKRouterHook]

    def __init__(self, number: int, trunk: Any, sites: Sequence[ChunkRouter], share: Share) -> None:
        super().__init__(number, trunk, [TopKRouterHook(site) for site in sites])
        self.sites = sites
        self.share = share
        self.layers = tuple(site.layer for site in sites)
        self.counts_all_ranks = any(site.module.get_aux_loss_coeff("global_aux_loss") for site in sites)
        self._names = list(inspect.signature(type(trunk).forward).parameters)[1:]

    def read_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call.read(self.trunk, self.share, self._names, args, kwargs)


class TopKRouterHook(RouterHook):
    """The hook on one router, which stands where Megatron's own replay would."""

    def __init__(self, site: ChunkRouter) -> None:
        router = site.module
        super().__init__(site.path, (router, "forward"), router.num_experts, router.topk)
        self.site = site
        # where groups are limited, two selections of groups come before that of experts
        self._final = 2 if router.config.moe_router_group_topk else 0
        self._by_probability = router.score_function != "softmax" or router.config.moe_router_pre_softmax
        self._seen: list[Selection] = []

    @contextmanager
    def installed(self, run: Callable[..., Any]) -> Iterator[None]:
        """See `SelectionHook`.

        Raises:
            ReplayError: when Megatron's own router replay is switched on.
        """
        require_idle(self.site)
        router = self.site.module
        has_bias = router.enable_expert_bias
        counting = overridden(router, "_apply_expert_bias", self._count_for_bias) if has_bias else nullcontext()
        with super().installed(run), counting:
            before, router.router_replay = router.router_replay, self
            try:
                yield
            finally:
                router.router_replay = before

    def select(
        self, now: LayerPass, forward: Callable[..., Any], hidden: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        """See `RouterHook`. Hidden states are [T, B, H]; the mask is bool [T, B], True for padding."""
        router = self.site.module
        rows = now.rows if isinstance(now.rows, ReplayRows) else None
        if rows is not None and rows.padding_R is not None:
            padding_mask = rows.padding_R.view(hidden.shape[:2])
        self._seen.clear()
        counts = None
        if rows is not None and rows.counts == "replayed" and router.is_aux_loss_enabled():
            sizes = (self.num_experts, self.top_k)
            counts = ExecutedCounts(lambda: self._seen[-1].ids_RK[None] if self._seen else None, sizes)
        with counts or nullcontext():
            result = forward(hidden, padding_mask)
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
        """Give scores [R, K] and ids int64 [R, K]: what Megatron's router asks of its `router_replay`.

        It hands in the scores [R, E] that it selects by, K, limits of groups if there are any, and its own selection.
        """
        now = self.now
        if now is None:
            raise ReplayError(f"router {self.path} selected outside of its forward")
        with SelectionMode(self._final, now) as mode:
            selected = default_compute_topk(scores, topk, num_groups, group_topk)
        for seen in mode.seen[self._final :]:
            if now.scores_into is not None:
                now.keep_scores(seen.scores_RE, seen.native_RK, by_probability=self._by_probability)
            self._seen.append(seen)
        return selected

    def _count_for_bias(
        self, apply: Callable[..., Any], routing_map: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        """Count for the expert bias. Megatron's own masking of its counters fails to broadcast."""
        rows = None if self.now is None else self.now.rows
        if isinstance(rows, ReplayRows) and rows.counts == "native" and torch.is_grad_enabled():
            routing_map = torch.zeros_like(routing_map).scatter(1, self._seen[-1].native_RK, True)
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        return apply(routing_map, padding_mask=None)


def require_idle(site: ChunkRouter) -> None:
    """Raise `ReplayError` if Megatron's own router replay is switched on."""
    action = getattr(site.module.router_replay, "router_replay_action", None)
    if action is not None:
        raise ReplayError(
            f"Megatron's own router replay is active at {site.path} ({action}); clear it with "
            "RouterReplay.clear_global_router_replay_action(), two replays cannot drive one router"
        )
