"""One router while hooks are in place: its selection forced or watched, its statistics told what to count.

Megatron's router hands the selection to `self.router_replay` where it has one: dense scores in, K scores and ids out.
The seat stands there, on the instance, for as long as hooks are in place. The score function, the gather of unbiased
scores, the normalisation and the scaling around it stay Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.megatron.discover import RouterSite
from foreroute.adapters.megatron.passes import LayerPass
from foreroute.errors import ReplayError
from foreroute.replay import Counts, forced_selection

AUX_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")


@dataclass(frozen=True)
class Selected:
    """What a router selected in its last forward.

    Attributes:
        ids_RK: int64 [R, K], executed.
        own_ids_RK: int64 [R, K], what it would have picked by itself; None if it was not asked.
        padding_R: bool [R], True for padding, or None.
        counts: which of the two its statistics count.
    """

    ids_RK: Tensor
    own_ids_RK: Tensor | None
    padding_R: Tensor | None
    counts: Counts


class Seat:
    """What stands on one router.

    Args:
        site: the router.
        position: its place among the routers of its chunk.

    Attributes:
        now: what it does in the pass on top; None outside of any.
    """

    def __init__(self, site: RouterSite, position: int) -> None:
        self.site = site
        self.position = position
        self.now: LayerPass | None = None
        self._selected: list[Selected] = []
        self._sitting: object = None
        self._stand_ins: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        router = site.module
        # group-limited routing reshapes by the number of rows it was called with, so that it takes all or none
        self._asks_all = bool(router.config.moe_router_group_topk)
        self._has_bias = bool(router.enable_expert_bias)

    @contextmanager
    def taken(self, on_call: Callable[[int], None]) -> Iterator[None]:
        """Sit on the router while the context is open, as by `take`, and refuse no call."""
        self.take(lambda path: None, on_call)
        try:
            yield
        finally:
            self.leave()

    def take(self, before_call: Callable[[str], None], on_call: Callable[[int], None]) -> None:
        """Sit down. Done for every recomputed part of a pass, so that it is kept to a few assignments.

        Args:
            before_call: told the router's path when it is called, may refuse.
            on_call: told the router's position when it has selected.
        """
        router, own = self.site.module, self.site.module.__dict__
        # somebody who wraps a stand-in meanwhile keeps it below theirs for good; it then only hands on
        self._sitting = sitting = object()
        stand_ins: dict[str, Any] = {
            "router_replay": self,
            "forward": partial(self._run, sitting, router.forward, before_call, on_call),
        }
        if self._has_bias:
            stand_ins["_apply_expert_bias"] = partial(self._count_for_bias, sitting, router._apply_expert_bias)
        for name in AUX_LOSSES if router.is_aux_loss_enabled() else ():
            stand_ins[name] = partial(self._count_for_loss, sitting, getattr(router, name))
        self._before = {name: own[name] for name in stand_ins if name in own}
        self._stand_ins = stand_ins
        own.update(stand_ins)

    def leave(self) -> None:
        """Restore exactly what was there; what somebody replaced meanwhile stays theirs."""
        own = self.site.module.__dict__
        for name, stand_in in self._stand_ins.items():
            if own.get(name) is not stand_in:
                continue
            if name in self._before:
                own[name] = self._before[name]
            else:
                del own[name]
        self._stand_ins, self._before, self._sitting = {}, {}, None

    def _run(
        self,
        sitting: object,
        forward: Callable[..., Any],
        before_call: Callable[[str], None],
        on_call: Callable[[int], None],
        hidden: Tensor,
        padding_mask: Tensor | None = None,
    ) -> Any:
        if sitting is not self._sitting:
            return forward(hidden, padding_mask)
        before_call(self.site.path)
        now = self.now
        if now is None:
            raise ReplayError(
                f"router {self.site.path} ran outside a forward of the attached model. Call the model that was "
                "attached, not a part of it; and where activations of a forward from before the session are "
                "recomputed, run its backward before the session is opened"
            )
        if now.padding_R is not None:
            padding_mask = now.padding_R.view(hidden.shape[:2])
        self._selected.clear()
        result = forward(hidden, padding_mask)
        if len(self._selected) != 1:
            raise ReplayError(
                f"router {self.site.path} made {len(self._selected)} selections in one forward that could be seen, "
                "expected 1: a fused or replaced selection bypasses replay"
            )
        self._selected.clear()
        on_call(self.position)
        return result

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
            raise ReplayError(f"router {self.site.path} selected outside of its forward")
        if now.rows is None:
            values_RK, ids_RK = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
            own_ids_RK: Tensor | None = ids_RK
        else:
            rows = now.rows if self._few_enough(now) else now.rows.asking_all()
            values_RK, ids_RK, own_ids_RK = forced_selection(
                scores,
                scores,
                rows,
                now.index,
                lambda own: default(own, topk, num_groups=num_groups, group_topk=group_topk)[1],
            )
        if now.notes is not None:
            by_probability = (
                self.site.module.score_function != "softmax" or self.site.module.config.moe_router_pre_softmax
            )
            own_ids = ids_RK if own_ids_RK is None else own_ids_RK
            now.notes.write(scores.detach(), ids_RK, own_ids, by_probability=by_probability)
        self._selected.append(Selected(ids_RK, own_ids_RK, now.padding_R, now.counts))
        return values_RK, ids_RK

    def _few_enough(self, now: LayerPass) -> bool:
        """Whether the router need not be asked about every row."""
        counts_own = self._has_bias and now.counts == "native" and torch.is_grad_enabled()
        return not (counts_own or (self._asks_all and now.rows is not None and now.rows.unrouted_Q is not None))

    def _count_for_bias(
        self, sitting: object, apply: Callable[..., Any], routing_map: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        """The counters that steer the expert bias. Megatron's own masking of them fails to broadcast."""
        if sitting is not self._sitting:
            return apply(routing_map, padding_mask=padding_mask)
        if not torch.is_grad_enabled():
            return apply(routing_map, padding_mask=None)
        selected = self._selected[-1]
        if selected.counts == "native" and selected.own_ids_RK is not None:
            routing_map = _as_map(selected.own_ids_RK, routing_map)
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        return apply(routing_map, padding_mask=None)

    def _count_for_loss(
        self,
        sitting: object,
        apply: Callable[..., Any],
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """One of the auxiliary losses; Megatron counts a selection that it makes anew of the router's scores."""
        if sitting is not self._sitting:
            return apply(probs, scores, routing_map, *args, **kwargs)
        selected = self._selected[-1]
        if selected.counts == "replayed":
            routing_map = _as_map(selected.ids_RK, routing_map)
            if selected.padding_R is not None:
                routing_map = routing_map & ~selected.padding_R[:, None]
        return apply(probs, scores, routing_map, *args, **kwargs)


def _as_map(ids_RK: Tensor, like_RE: Tensor) -> Tensor:
    """Bool [R, E], True at the ids."""
    return torch.zeros_like(like_RE, dtype=torch.bool).scatter(1, ids_RK, True)
