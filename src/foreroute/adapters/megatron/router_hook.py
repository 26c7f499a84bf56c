"""One router while hooks are in place: its selection forced or watched, its statistics told what to count.

Megatron's router hands the selection to `self.router_replay` where it has one: dense scores in, K scores and ids out.
The hook stands there, on the instance, for as long as hooks are in place. The score function, the gather of unbiased
scores, the normalisation and the scaling around it stay Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.core.hooks import RouterHook
from foreroute.core.selection import LayerPass
from foreroute.errors import ReplayError
from foreroute.replay import Counts, ReplayRows

AUX_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""The methods of Megatron's `TopKRouter` that count tokens for a load-balancing loss."""


@dataclass(frozen=True)
class Selected:
    """What a router selected in its last forward.

    Attributes:
        ids_RK: int64 [R, K], executed.
        own_RK: int64 [R, K], what it would have picked by itself.
        padding_R: bool [R], True for padding, or None.
        counts: which of the two its statistics count.
    """

    ids_RK: Tensor
    own_RK: Tensor
    padding_R: Tensor | None
    counts: Counts


class TopKRouterHook(RouterHook):
    """The hook on one router.

    Args:
        site: the router.
    """

    def __init__(self, site: ChunkRouter) -> None:
        super().__init__(site.path, (site.module, "forward"), site.module.num_experts, site.module.topk)
        self.site = site
        self._selected: list[Selected] = []
        self._installation: object = None
        self._stand_ins: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        router = site.module
        self._has_groups = bool(router.config.moe_router_group_topk)
        self._has_bias = bool(router.enable_expert_bias)

    def install(self, run: Callable[..., Any]) -> None:
        """See `SelectionHook`. Kept to a few assignments, since every recomputed part of a pass does it.

        Raises:
            ReplayError: when Megatron's own router replay is switched on.
        """
        require_idle(self.site)
        self._run = run
        router, own = self.site.module, self.site.module.__dict__
        # somebody who wraps a stand-in meanwhile keeps it below theirs for good; it then only hands on
        self._installation = installation = object()
        stand_ins: dict[str, Any] = {
            "router_replay": self,
            "forward": partial(self._forward, installation, router.forward),
        }
        if self._has_bias:
            stand_ins["_apply_expert_bias"] = partial(self._count_for_bias, installation, router._apply_expert_bias)
        for name in AUX_LOSSES if router.is_aux_loss_enabled() else ():
            stand_ins[name] = partial(self._count_for_loss, installation, getattr(router, name))
        self._before = {name: own[name] for name in stand_ins if name in own}
        self._stand_ins = stand_ins
        own.update(stand_ins)

    def remove(self) -> None:
        """See `SelectionHook`."""
        own = self.site.module.__dict__
        for name, stand_in in self._stand_ins.items():
            if own.get(name) is not stand_in:
                continue
            if name in self._before:
                own[name] = self._before[name]
            else:
                del own[name]
        self._stand_ins, self._before, self._installation = {}, {}, None

    def _forward(
        self, installation: object, forward: Callable[..., Any], hidden: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        if installation is not self._installation:
            return forward(hidden, padding_mask)
        return self._run(forward, hidden, padding_mask)

    def select(self, now: LayerPass, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `RouterHook`. The forward takes hidden states [T, B, H] and a mask of padding [T, B], or None."""
        hidden, padding_mask = args
        padding_R = now.rows.padding_R if isinstance(now.rows, ReplayRows) else None
        if padding_R is not None:
            padding_mask = padding_R.view(hidden.shape[:2])
        self._selected.clear()
        result = forward(hidden, padding_mask)
        if len(self._selected) != 1:
            raise ReplayError(
                f"router {self.path} made {len(self._selected)} selections in one forward that could be seen, "
                "expected 1: a fused or replaced selection bypasses replay"
            )
        (selected,) = self._selected
        self._selected.clear()
        is_live = now.weights_into is None and now.weights_RK is None
        return result if is_live else _with_gate_weights(result, selected.ids_RK, now)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What Megatron's router asks of its `router_replay`: K scores [R, K] and ids int64 [R, K].

        Args:
            scores: dense scores [R, E] that are selected by.
            topk: K.
            num_groups: of group-limited routing.
            group_topk: groups that a token may use.
            default_compute_topk: the router's own selection.
        """
        now, default = self.now, default_compute_topk
        if now is None or default is None:
            raise ReplayError(f"router {self.path} selected outside of its forward")

        def own_choice(given: Tensor) -> tuple[Tensor, Tensor]:
            return default(given, topk, num_groups=num_groups, group_topk=group_topk)

        # with groups, the best score that is left out is that of an expert which could have been picked
        seen = TopKInput(scores) if self._has_groups and now.scores_into is not None else None
        with seen or nullcontext():
            if now.ids_RK is None:
                values_RK, ids_RK = own_choice(scores)
                own_RK = ids_RK
                now.keep(own_RK)
            else:
                ids_RK, own_RK = now.choose(None if now.again else own_choice(scores.detach())[1])
                values_RK = scores.gather(1, ids_RK)
        router = self.site.module
        by_probability = router.score_function != "softmax" or router.config.moe_router_pre_softmax
        now.keep_scores(scores if seen is None else seen.scores_RE, own_RK, by_probability=by_probability)
        rows = now.rows if isinstance(now.rows, ReplayRows) else None
        padding_R, counts = (None, "native") if rows is None else (rows.padding_R, rows.counts)
        self._selected.append(Selected(ids_RK, own_RK, padding_R, counts))
        return values_RK, ids_RK

    def _count_for_bias(
        self, installation: object, apply: Callable[..., Any], routing_map: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        """The counters that steer the expert bias. Megatron's own masking of them fails to broadcast."""
        if installation is not self._installation:
            return apply(routing_map, padding_mask=padding_mask)
        if not torch.is_grad_enabled():
            return apply(routing_map, padding_mask=None)
        selected = self._selected[-1]
        if selected.counts == "native":
            routing_map = _as_map(selected.own_RK, routing_map)
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        return apply(routing_map, padding_mask=None)

    def _count_for_loss(
        self,
        installation: object,
        apply: Callable[..., Any],
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """One of the auxiliary losses; Megatron counts a selection that it makes anew of the router's scores."""
        if installation is not self._installation:
            return apply(probs, scores, routing_map, *args, **kwargs)
        selected = self._selected[-1]
        if selected.counts == "replayed":
            routing_map = _as_map(selected.ids_RK, routing_map)
            if selected.padding_R is not None:
                routing_map = routing_map & ~selected.padding_R[:, None]
        return apply(probs, scores, routing_map, *args, **kwargs)


class TopKInput(TorchFunctionMode):
    """Notes what the last top-k over all experts selects from: the scores, masked where groups are closed.

    Args:
        scores_RE: [R, E], before any masking.
    """

    def __init__(self, scores_RE: Tensor) -> None:
        super().__init__()
        self.scores_RE = scores_RE

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs everything as it is."""
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            given: Tensor = args[0] if args else kwargs["input"]
            if given.shape == self.scores_RE.shape:
                self.scores_RE = given
        return func(*args, **kwargs)


def require_idle(site: ChunkRouter) -> None:
    """Raise `ReplayError` if Megatron's own router replay is switched on."""
    own: Any = getattr(site.module, "router_replay", None)
    action = getattr(own, "router_replay_action", None)
    if action is not None:
        raise ReplayError(
            f"Megatron's own router replay is active at {site.path} ({action}); clear it with "
            "RouterReplay.clear_global_router_replay_action(), two replays cannot drive one router"
        )


def _as_map(ids_RK: Tensor, like_RE: Tensor) -> Tensor:
    """Bool [R, E], True at the ids."""
    return torch.zeros_like(like_RE, dtype=torch.bool).scatter(1, ids_RK, True)


def _with_gate_weights(result: tuple[Tensor, Tensor], ids_RK: Tensor, now: LayerPass) -> tuple[Tensor, Tensor]:
    """What a router returned, with the weights to force in the slots that have a route.

    It hands on dense weights [R, E], zero outside of its picks, and a map of them.
    """
    probs_RE, routing_map = result
    own_RK = probs_RE.gather(1, ids_RK)
    weights_RK = now.gate_weights(own_RK)
    return (probs_RE if weights_RK is own_RK else probs_RE.scatter(1, ids_RK, weights_RK)), routing_map
