"""Gate weights at given experts, for those who write their own router: no hooks, no session.

weights, ids = select_at(logits, routes, gate="sigmoid", bias=bias, groups=(8, 4, 2), normalize=True, scale=2.5)
"""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from .deferred_checks import DeferredChecks
from .errors import ReplayError
from .route_ids import INTEGERS, described, find_faults, raise_faults, signed

Gate = Literal["softmax", "sigmoid", "scores", "softmax of picks", "sigmoid of picks"]
"""Basis of selection and weights: a softmax of logits, a sigmoid of them, or scores as they are; or logits, of
which the picks' softmax or sigmoid is taken."""


def select_at(
    scores: Tensor,
    ids: Tensor,
    *,
    gate: Gate = "softmax",
    bias: Tensor | None = None,
    groups: tuple[int, int, int] | None = None,
    normalize: bool = False,
    epsilon: float = 1e-20,
    scale: float = 1.0,
    checks: DeferredChecks | None = None,
) -> tuple[Tensor, Tensor]:
    """Weigh given experts by live scores, as a router does that picks them: weights [..., K], ids int64 [..., K].

    Gradients flow through the scores. Nothing waits for the device, and `torch.compile(fullgraph=True)` takes it.

    Args:
        scores: [..., E], logits; with the gate "scores" what was made of them.
        ids: integers [..., K], the experts of each row; -1 in all of a row that has none, which gets the native picks.
        gate: what is selected by, and weighed by.
        bias: [E], added for native picks alone.
        groups: native picks are from the best groups of neighbouring experts: how many groups there are, how many are
            kept, and of how many experts the sum is a group's score (DeepSeek-V3: 2, DeepSeek-V2: 1).
        normalize: whether weights are divided by their sum and `epsilon`.
        epsilon: beside sums from 1e-12 on the default is nothing.
        scale: of weights, in the end.
        checks: is asked, outside of compiled graphs, whether ids are wrong: it raises on the CPU at once, on a GPU in a
            later call, or before an optimizer's next step.

    Rows with an id out of range, an expert twice or -1 beside experts get the native picks with weights of NaN, so that
    the loss tells in a graph and without `checks`. Weights are float32, or float64 of such scores; cast them as the
    router does.

    Raises:
        ReplayError: when types or shapes do not fit; by `checks`.
    """
    if not _fit(scores, ids, bias, groups) or gate not in get_args(Gate):
        said = f"scores are {described(scores)}, ids {described(ids)}, the bias {described(bias)}, groups {groups}"
        raise ReplayError(
            f"{said}, the gate is {gate!r}; expected floats [..., E], integers [..., K], [E], groups that divide E and "
            f"keep K <= E experts, one of {get_args(Gate)}"
        )
    num_experts, top_k = scores.shape[-1], ids.shape[-1]
    live = scores if scores.dtype == torch.float64 else scores.float()
    if gate in ("softmax", "sigmoid"):
        live = _activated(live, gate)
    choice = live.detach() if bias is None else live.detach() + bias
    if groups is not None:
        number, kept, counted = groups
        best = choice.unflatten(-1, (number, -1)).topk(counted, dim=-1).values.sum(-1)
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(kept, dim=-1).indices, True)
        choice = choice.masked_fill(~is_kept.repeat_interleave(num_experts // number, dim=-1), -torch.inf)
    given = signed(ids)
    is_given = given >= 0
    too_large, twice = find_faults(given, is_given, num_experts)
    in_part = is_given.any(-1) & ~is_given.all(-1)
    wrong = too_large | twice | in_part
    if checks is not None and not torch.compiler.is_compiling():
        faults = torch.stack([each.sum() for each in (too_large, twice, in_part)])
        checks.add(wrong.any(), partial(raise_faults, faults, "their gate weights are NaN"))
    forced = (is_given.all(-1) & ~wrong)[..., None]
    chosen = torch.where(forced, given.long(), choice.topk(top_k, dim=-1).indices)
    weights = live.gather(-1, chosen)
    if gate.endswith("of picks"):
        weights = _activated(weights, gate)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return (weights * scale).masked_fill(wrong[..., None], torch.nan), chosen


def _fit(scores: Tensor, ids: Tensor, bias: Tensor | None, groups: tuple[int, int, int] | None) -> bool:
    if not isinstance(scores, Tensor) or not isinstance(ids, Tensor) or not scores.ndim or not ids.ndim:
        return False
    if scores.shape[:-1] != ids.shape[:-1] or not scores.is_floating_point() or ids.dtype not in INTEGERS:
        return False
    num_experts, top_k = scores.shape[-1], ids.shape[-1]
    number, kept, counted = (1, 1, 1) if groups is None else groups
    if number < 1 or num_experts % number or not 1 <= kept <= number or not 1 <= counted <= num_experts // number:
        return False
    return top_k <= kept * (num_experts // number) and (bias is None or bias.shape == (num_experts,))


def _activated(logits: Tensor, gate: Gate) -> Tensor:
    return logits.softmax(-1) if gate.startswith("softmax") else logits.sigmoid()
