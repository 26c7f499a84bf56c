"""Log-probabilities of sampled tokens on the sets that they were drawn from, forward and gradient.

With the recorded set I of a row, its token y in I, logits l and temperature T:

    log p(y) = l_y / T - log Σ_{j in I} exp(l_j / T)
    d log p(y) / d l_j = ([j = y] - [j in I] p(j)) / T

Only temperature and set are used: what top-p, top-k or min-p would keep under the trainer's logits is another set.

`masked_logprobs` starts from the hidden states in front of the output head, and makes logits for a part of the head at
a time. `masked_logprobs_of_logits` starts from logits that are there. Neither waits for the device: sets are uploaded
once for a call, and a token outside of its set is told by `DeferredChecks`.

Letters: R rows, V rows of the head, H hidden size, M ids of all sets one after the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import BatchMismatchError, ConfigError, TraceContentError
from foreroute.replay.rows import to_device
from foreroute.trace import DecisionStream
from foreroute.trace.checks import join_ranges

TILE_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Numbers of a part of the head or its logits: 64 MiB in float32 on a CPU core, which takes as long with a quarter or
four times as much; more on a GPU, where each part costs launches."""
_checks = DeferredChecks()
"""Whether tokens are in their sets, of calls whose device has not answered yet: no call waits for its own answer."""


def masked_logprobs(
    hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute log-probabilities of sampled tokens on their recorded sets, without logits of all choices.

    The head is linear and without bias; for another one, and for logits that are capped, use
    `masked_logprobs_of_logits`. Products of bfloat16 are added up in float32. On a GPU the gradient of a logit is
    rounded to bfloat16 before it meets a bfloat16 head or hidden state; each gradient is rounded to its own dtype once.

    Args:
        hidden_RH: floats [R, H], what the output head is put on.
        head_VH: floats [V, H], its weight; rows past the choices of the masks are padding.
        targets_R: integers [R], the token that was sampled at each row.
        masks: of the R rows: `trace.streams["sampling"].take(rows)`, where row p of a sequence predicts token p + 1.
        temperature: that the rollout divided logits by.

    Returns:
        float32 [R], float64 where hidden states or head are. Gradients reach hidden states and head.

    Raises:
        BatchMismatchError: when the shapes do not belong together, or a set lacks the token that was sampled; of
            tensors on a GPU the latter in a later call, or before the next step of any optimizer of torch.
        TraceContentError: when a row has no mask.
        ConfigError: when the temperature is not above 0.
    """
    if hidden_RH.ndim != 2 or head_VH.ndim != 2 or hidden_RH.shape[1] != head_VH.shape[1]:
        raise BatchMismatchError(
            f"hidden states have shape {tuple(hidden_RH.shape)} and the head {tuple(head_VH.shape)}; expected [R, H] "
            "and [V, H]"
        )
    sets = _Sets.of(masks, targets_R, (len(hidden_RH), len(head_VH)), temperature, hidden_RH.device)
    device = hidden_RH.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        logprobs: Tensor = _OnSets.apply(hidden_RH, head_VH, sets, temperature)
    return logprobs


def masked_logprobs_of_logits(
    logits_RV: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute log-probabilities of sampled tokens on their recorded sets from logits, of which no copy is made.

    Rows whose sets left nothing out are copied. `logits_RV` are floats [R, V], as the model returns them, and what is
    past the choices of the masks is padding; the other arguments, and errors, are those of `masked_logprobs`. Returns
    float32 [R], float64 where the logits are.
    """
    if logits_RV.ndim != 2:
        raise BatchMismatchError(f"logits have shape {tuple(logits_RV.shape)}; expected [R, V]")
    sets = _Sets.of(masks, targets_R, (len(logits_RV), logits_RV.shape[1]), temperature, logits_RV.device)
    wide, row_M, num_logits = _wide(logits_RV), sets.row_M, logits_RV.shape[1]
    # A token that is no logit is told by the check of its set.
    chosen_R = logits_RV.gather(1, sets.targets_R.clamp(0, num_logits - 1)[:, None])[:, 0].to(wide) / temperature
    logits_M = logits_RV.reshape(-1).index_select(0, row_M * num_logits + sets.ids_M).to(wide) / temperature
    # Sums are taken relative to the highest logit of each set.
    top_R = torch.full(sets.counts_R.shape, -torch.inf, dtype=wide, device=logits_RV.device)
    top_R = top_R.scatter_reduce(0, row_M, logits_M.detach(), "amax")
    sums_R = torch.zeros_like(top_R).index_add(0, row_M, (logits_M - top_R[row_M]).exp())
    log_sums_R = top_R + sums_R.log()
    if len(sets.unlimited):
        whole = logits_RV.index_select(0, sets.unlimited)[:, : masks.num_choices].to(wide) / temperature
        log_sums_R = log_sums_R.index_copy(0, sets.unlimited, whole.logsumexp(-1))
    return chosen_R - log_sums_R


@dataclass(frozen=True, eq=False)
class _Sets:
    """The sets of a call, on the device of its numbers, and the tokens that were drawn from them."""

    masks: DecisionStream
    targets_R: Tensor
    ids_M: Tensor
    row_M: Tensor  # of each id
    counts_R: Tensor  # ids of each set; 0 where nothing was left out
    unlimited: Tensor  # the rows that left nothing out

    @classmethod
    def of(
        cls,
        masks: DecisionStream,
        targets_R: Tensor,
        shape: tuple[int, int],
        temperature: float,
        device: torch.device,
    ) -> _Sets:
        """Check what the host knows of a call, upload its sets, and have the device look for the tokens in them."""
        _require_fit(masks, targets_R, shape, temperature)
        counts, ids_M = masks.counts_ND[:, 0], to_device(masks.ids, device).long()
        counts_R = to_device(counts, device)
        row_M = torch.arange(len(counts), device=device).repeat_interleave(counts_R, output_size=len(ids_M))
        unlimited = to_device(np.flatnonzero(counts == 0), device)
        targets_R = targets_R.detach().to(torch.int64, copy=True)  # whoever gave them may overwrite them
        sets = cls(masks, targets_R, ids_M, row_M, counts_R, unlimited)
        found_R = torch.zeros_like(targets_R).index_add(0, row_M, (ids_M == targets_R[row_M]).long()) > 0
        is_choice_R = (targets_R >= 0) & (targets_R < masks.num_choices)
        wrong = ~(is_choice_R & (found_R | (counts_R == 0))).all()
        _checks.add(wrong, partial(_raise_outside, masks, targets_R))
        return sets


class _OnSets(torch.autograd.Function):
    """Log-probabilities [R] of hidden states on sets; those of sets of one are 0, without gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, head_VH: Tensor, sets: _Sets, temperature: float) -> Tensor:
        ctx.tiles = tiles = _Tiles(sets, temperature, torch.promote_types(_wide(hidden_RH), head_VH.dtype), head_VH)
        hidden = hidden_RH.index_select(0, tiles.rows)
        log_sums = chosen = hidden.new_full(tiles.rows.shape, -torch.inf, dtype=tiles.wide)
        for part, at in tiles.parts:
            logits, column, is_here = tiles.logits_of(part, at, hidden, head_VH)
            log_sums = torch.logaddexp(log_sums, logits.logsumexp(-1))
            chosen = torch.where(is_here, logits.gather(1, column)[:, 0], chosen)
        ctx.save_for_backward(hidden_RH, head_VH, log_sums)
        return hidden.new_zeros(len(hidden_RH), dtype=tiles.wide).index_copy(0, tiles.rows, chosen - log_sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, head_VH, log_sums = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        hidden, scale = hidden_RH.index_select(0, tiles.rows), gradient_R[tiles.rows, None] / tiles.temperature
        to_rows = torch.zeros(hidden.shape, dtype=tiles.wide, device=hidden.device)
        to_head = torch.zeros_like(head_VH) if ctx.needs_input_grad[1] else None
        for part, at in tiles.parts:
            logits, column, is_here = tiles.logits_of(part, at, hidden, head_VH)
            # A slope is the gradient of a logit: minus its probability, and plus one for the token that was sampled.
            slopes = logits.sub_(log_sums[:, None]).exp_().mul_(-scale)
            slopes.scatter_add_(1, column, scale * is_here[:, None])
            to_rows += _product(slopes, head_VH[part], tiles.wide)
            if to_head is not None:  # a part is added up in the wide type, and rounded once
                to_head[part] = _product(slopes.T, hidden, tiles.wide).to(to_head.dtype)
        to_hidden = torch.zeros_like(hidden_RH).index_copy(0, tiles.rows, to_rows.to(hidden_RH.dtype))
        return to_hidden, to_head, None, None


class _Tiles:
    """The cut of a call: logits of all rows but those of sets of one, for a part of the head at a time."""

    def __init__(self, sets: _Sets, temperature: float, wide: torch.dtype, head_VH: Tensor) -> None:
        masks, device = sets.masks, head_VH.device
        self.temperature, self.wide = temperature, wide
        # on the host, which has the sets: the device is not asked how many ids a part gets
        rows = np.flatnonzero(masks.counts_ND[:, 0] != 1)
        at = join_ranges(masks.offsets[:-1][rows], masks.counts_ND[rows, 0])
        at = at[np.argsort(masks.ids[at], kind="stable")]
        numbers = TILE_NUMBERS["cuda" if device.type == "cuda" else "cpu"]
        step = max(1, numbers // max(head_VH.shape[1], len(rows), 1))
        begins = range(0, masks.num_choices, step)
        lengths = np.diff(np.searchsorted(masks.ids[at], begins), append=len(at)).tolist()
        parts = [slice(begin, min(begin + step, masks.num_choices)) for begin in begins]
        self.rows = to_device(rows, device)
        self.parts = list(zip(parts, to_device(at, device).split_with_sizes(lengths), strict=True))
        self._sets, self._is_limited = sets, sets.counts_R[self.rows] > 0
        self._target_of = sets.targets_R[self.rows]
        self._place_R = torch.zeros_like(sets.counts_R).index_copy(0, self.rows, torch.arange(len(rows), device=device))

    def logits_of(self, part: slice, at: Tensor, hidden: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logits [rows, part] over the temperature, and find the column of each token, if it is here."""
        logits = _product(hidden, head_VH[part].T, self.wide).div_(self.temperature)
        left_out = self._is_limited[:, None].repeat(1, logits.shape[1])
        left_out[self._place_R[self._sets.row_M[at]], self._sets.ids_M[at] - part.start] = False
        column = self._target_of - part.start
        is_here = (column >= 0) & (column < logits.shape[1])
        return logits.masked_fill_(left_out, -torch.inf), column.clamp(0, logits.shape[1] - 1)[:, None], is_here


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """Multiply matrices, whose products are added up in the wide type."""
    if right.is_cuda and right.dtype == torch.bfloat16 and wide == torch.float32:
        # Tensor cores, which the CPU has no kernel for that hands on its sums unrounded.
        return torch.mm(left.to(right.dtype), right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _wide(floats: Tensor) -> torch.dtype:
    return torch.promote_types(floats.dtype, torch.float32)


def _require_fit(masks: DecisionStream, targets_R: Tensor, shape: tuple[int, int], temperature: float) -> None:
    """Raise for what the host knows of a call of this many rows and logits."""
    num_rows, num_logits = shape
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; expected a number above 0. Greedy rollouts have no masks")
    integers = not targets_R.is_floating_point() and targets_R.dtype != torch.bool
    if masks.depth != 1 or targets_R.shape != (num_rows,) or masks.num_rows != num_rows or not integers:
        raise BatchMismatchError(
            f"got {num_rows} rows, {targets_R.dtype} targets of shape {tuple(targets_R.shape)} and masks of "
            f"{masks.num_rows} rows; expected an integer and a mask for each row"
        )
    if masks.num_choices > num_logits:
        raise BatchMismatchError(
            f"the masks are sets of {masks.num_choices} tokens, the head has {num_logits}; expected as many or more. "
            "Replay the masks of a rollout of this model"
        )
    if not masks.valid_N.all():
        raise TraceContentError(
            f"row {int(np.argmin(masks.valid_N))} has no sampling mask ({int((~masks.valid_N).sum())} such rows); "
            "leave out tokens that were not sampled, and record the masks of all others"
        )


def _raise_outside(masks: DecisionStream, targets_R: Tensor) -> None:
    """Raise `BatchMismatchError` naming the first token that is not in its set, which the host waits for."""
    tokens = targets_R.cpu().numpy()
    outside = ~masks.contains(tokens)
    if outside.any():
        row = int(outside.argmax())
        raise BatchMismatchError(
            f"the mask of row {row} leaves out its token {int(tokens[row])} ({int(outside.sum())} such rows); the "
            "masks belong to other tokens, or to other rows: that of token p + 1 stands in row p"
        )
