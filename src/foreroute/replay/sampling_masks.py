"""Log-probabilities of sampled tokens on the sets that they were drawn from, forward and gradient.

With the recorded set I of a row, its token y in I, logits l and temperature T:

    log p(y) = l_y / T - log Σ_{j in I} exp(l_j / T)
    d log p(y) / d l_j = ([j = y] - [j in I] p(j)) / T

Only temperature and set are used: what top-p, top-k or min-p would keep under the trainer's logits is another set.

`masked_logprobs` starts from the hidden states in front of the output head, and makes the logits of the sets alone:
rows of sets of about one size gather the head's rows, a block at a time. Rows of large sets and of none, which left
nothing out, make all logits, a part of the head at a time. `masked_logprobs_of_logits` starts from logits that are
there. Neither waits for the device: sets are uploaded once for a call, and a token outside of its set is told by
`DeferredChecks`.

Letters: R rows, V rows of the head, H hidden size, M ids of all sets one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import BatchMismatchError, ConfigError, TraceContentError
from foreroute.replay.rows import to_device
from foreroute.trace import DecisionStream
from foreroute.trace.checks import join_ranges

BLOCK_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Numbers of a gathered block, or of a part of the head or its logits: 64 MiB in float32 on a CPU core, which takes as
long with a quarter or four times as much; more on a GPU, where each block costs launches."""
GATHERED_SHARE = 64
"""A row gathers the head for sets of up to so small a part of all choices; larger ones are cheaper as a tile. Chosen by
hand: at H = 512, a CPU core took as long for one gathered logit as for about 90 of a matrix product."""
_checks = DeferredChecks()
"""Checks that tokens are in their sets, of calls whose device has not answered: no call waits for its own answer."""


def masked_logprobs(
    hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute log-probabilities of sampled tokens on their recorded sets, without logits of all choices.

    The head is linear and without bias; for another one, and for logits that are capped, use
    `masked_logprobs_of_logits`. Products of bfloat16 are exact in float32, in which they are added up. On a GPU the
    gradient of a logit is rounded to bfloat16, 1 part in 2^9, before it meets a bfloat16 head or hidden state, as in a
    linear layer; each gradient is rounded to its own dtype once.

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
    logits_RV: Tensor,
    targets_R: Tensor,
    masks: DecisionStream,
    *,
    temperature: float = 1.0,
    vocabulary_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute log-probabilities of sampled tokens on their recorded sets from logits, of which no copy is made.

    Rows whose sets left nothing out are copied. Under tensor parallelism each rank has the logits of its part of the
    vocabulary, as Megatron's output layer gives them: parts are of one size, in the order of ranks, and what is past
    the choices of the masks is padding. Ranks then exchange 12 bytes a row (24 in float64), and each has all
    log-probabilities, and the gradients of its logits where all have the same loss.

    `logits_RV` are floats [R, V], as the model returns them, and `vocabulary_group` is the ranks that share the rows;
    the other arguments, and errors, are those of `masked_logprobs`. Returns float32 [R], float64 where the logits are.
    """
    kept = _SetLogits.of(logits_RV, targets_R, masks, temperature, vocabulary_group)
    return kept.chosen_R - kept.log_sums_R


def masked_entropy_of_logits(
    logits_RV: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute the entropy [R] of the sets' distributions, in nats; the rest is as in `masked_logprobs_of_logits`."""
    kept = _SetLogits.of(logits_RV, targets_R, masks, temperature)
    sets = kept.sets
    # -sum p log p = log Z - sum p l
    means_R = torch.zeros_like(kept.log_sums_R).index_add(
        0, sets.row_M, (kept.logits_M - kept.log_sums_R[sets.row_M]).exp() * kept.logits_M
    )
    if kept.all_logits is not None:
        whole = (kept.all_logits.softmax(-1) * kept.all_logits).sum(-1)
        means_R = means_R.index_copy(0, sets.unlimited, whole)
    return kept.log_sums_R - means_R


@dataclass(frozen=True, eq=False)
class _Sets:
    """The sets of a call, on the device of its numbers, and the tokens that were drawn from them."""

    masks: DecisionStream
    targets_R: Tensor
    ids_M: Tensor
    row_M: Tensor  # of each id
    counts_R: Tensor  # ids of each set; 0 where nothing was left out
    begin_R: Tensor  # where the ids of each set begin
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
        sets = cls(masks, targets_R, ids_M, row_M, counts_R, to_device(masks.offsets[:-1], device), unlimited)
        found_R = torch.zeros_like(targets_R).index_add(0, row_M, (ids_M == targets_R[row_M]).long()) > 0
        is_choice_R = (targets_R >= 0) & (targets_R < masks.num_choices)
        wrong = ~(is_choice_R & (found_R | (counts_R == 0))).all()
        _checks.add(wrong, partial(_raise_outside, masks, targets_R))
        return sets


@dataclass(frozen=True, eq=False)
class _SetLogits:
    """Logits over the temperature, of the sets alone."""

    sets: _Sets
    logits_M: Tensor
    all_logits: Tensor | None  # [unlimited rows, V]; None where there is no such row
    log_sums_R: Tensor  # the logarithm of the sum of exp(logits) of each set
    chosen_R: Tensor  # of the tokens that were sampled

    @classmethod
    def of(
        cls,
        logits_RV: Tensor,
        targets_R: Tensor,
        masks: DecisionStream,
        temperature: float,
        group: dist.ProcessGroup | None = None,
    ) -> _SetLogits:
        """Take the logits of the sets that are here, and add up over the ranks of a group, which have the others."""
        if logits_RV.ndim != 2:
            raise BatchMismatchError(f"logits have shape {tuple(logits_RV.shape)}; expected [R, V]")
        num_rows, num_here = logits_RV.shape
        num_ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        sets = _Sets.of(masks, targets_R, (num_rows, num_here * num_ranks), temperature, logits_RV.device)
        wide, row_M, first = _wide(logits_RV), sets.row_M, rank * num_here
        # A token that no part has is told by the check of its set.
        columns_R, columns_M = sets.targets_R - first, sets.ids_M - first
        chosen_R = logits_RV.gather(1, columns_R.clamp(0, num_here - 1)[:, None])[:, 0].to(wide) / temperature
        picked_M = row_M * num_here + columns_M.clamp(0, num_here - 1)
        logits_M = logits_RV.reshape(-1).index_select(0, picked_M).to(wide) / temperature
        if group is not None:
            chosen_R = chosen_R.masked_fill((columns_R < 0) | (columns_R >= num_here), 0)
            logits_M = logits_M.masked_fill((columns_M < 0) | (columns_M >= num_here), -torch.inf)
        # Sums are taken relative to the highest logit of each set.
        top_R = torch.full(sets.counts_R.shape, -torch.inf, dtype=wide, device=logits_RV.device)
        top_R = top_R.scatter_reduce(0, row_M, logits_M.detach(), "amax")
        all_logits = None
        if len(sets.unlimited):
            num_choices = sets.masks.num_choices - first
            all_logits = logits_RV.index_select(0, sets.unlimited)[:, : max(1, num_choices)].to(wide) / temperature
            if num_choices < 1:  # padding alone is here
                all_logits = torch.full_like(all_logits, -torch.inf)
            top_R = top_R.index_copy(0, sets.unlimited, all_logits.detach().amax(-1))
        if group is not None:
            dist.all_reduce(top_R, dist.ReduceOp.MAX, group=group)
        sums_R = torch.zeros_like(top_R).index_add(0, row_M, (logits_M - top_R[row_M]).exp())
        if all_logits is not None:
            sums_R = sums_R.index_copy(0, sets.unlimited, (all_logits - top_R[sets.unlimited, None]).exp().sum(-1))
        if group is not None:
            sums_R, chosen_R = _SumOverRanks.apply(torch.stack([sums_R, chosen_R]), group)
        return cls(sets, logits_M, all_logits, top_R + sums_R.log(), chosen_R)


class _SumOverRanks(torch.autograd.Function):
    """A sum whose gradient each rank has already, as all have the same loss."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = addend.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _OnSets(torch.autograd.Function):
    """Log-probabilities [R] of hidden states on sets; those of sets of one are 0, without gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, head_VH: Tensor, sets: _Sets, temperature: float) -> Tensor:
        ctx.work = work = _Work(sets, temperature, torch.promote_types(_wide(hidden_RH), head_VH.dtype), head_VH)
        logprobs_R = torch.zeros(len(hidden_RH), dtype=work.wide, device=hidden_RH.device)
        logits_of_blocks = []
        for block in work.blocks:
            logits = work.logits_of(block, hidden_RH, head_VH)
            chosen = logits.masked_fill(~block.is_target, -torch.inf).amax(-1)
            logprobs_R[block.rows] = chosen - logits.logsumexp(-1)
            logits_of_blocks.append(logits)
        large_hidden = hidden_RH.index_select(0, work.large)
        log_sums = chosen = torch.full(work.large.shape, -torch.inf, dtype=work.wide, device=hidden_RH.device)
        for number in range(len(work.parts) if len(work.large) else 0):
            logits, column, is_here = work.tile_of(number, large_hidden, head_VH)
            log_sums = torch.logaddexp(log_sums, logits.logsumexp(-1))
            chosen = torch.where(is_here, logits.gather(1, column)[:, 0], chosen)
        logprobs_R[work.large] = chosen - log_sums
        ctx.save_for_backward(hidden_RH, head_VH, log_sums, *logits_of_blocks)
        return logprobs_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, head_VH, log_sums, *logits_of_blocks = ctx.saved_tensors
        work: _Work = ctx.work
        sets, wide, scale_R = work.sets, work.wide, gradient_R / work.temperature
        to_hidden = torch.zeros(hidden_RH.shape, dtype=wide, device=hidden_RH.device)
        # A slope is the gradient of a logit: minus its probability, and plus one for the token that was sampled.
        slope_M = to_hidden.new_zeros(len(sets.ids_M) + 1)  # what fills up a row writes behind the ids
        for block, logits in zip(work.blocks, logits_of_blocks, strict=True):
            slopes = (block.is_target.to(wide) - logits.softmax(-1)) * scale_R[block.rows, None]
            to_hidden[block.rows] = _product(slopes[:, None], work.heads_of(block, head_VH), wide)[:, 0]
            slope_M.scatter_(0, block.at.where(block.is_kept, len(sets.ids_M)).flatten(), slopes.flatten())
        to_head = torch.zeros_like(head_VH) if ctx.needs_input_grad[1] else None
        by_id: Sequence[Tensor] = () if to_head is None else work.sorted_by_id(work.is_small)
        large_hidden, scale = hidden_RH.index_select(0, work.large), scale_R[work.large, None]
        to_large = torch.zeros(large_hidden.shape, dtype=wide, device=hidden_RH.device)
        for number, part in enumerate(work.parts if len(work.large) or to_head is not None else ()):
            # One part of the head at a time is added up in the wide type, and rounded once.
            to_part = None
            if to_head is not None:
                to_part = to_head[part] if to_head.dtype == wide else to_hidden.new_zeros(to_head[part].shape)
            if len(work.large):
                logits, column, is_here = work.tile_of(number, large_hidden, head_VH)
                slopes = logits.sub_(log_sums[:, None]).exp_().mul_(-scale)
                slopes.scatter_add_(1, column, scale * is_here[:, None])
                to_large += _product(slopes, head_VH[part], wide)
                if to_part is not None:
                    to_part += _product(slopes.T, large_hidden, wide)
            if to_head is not None and to_part is not None:
                for at in by_id[number].split(work.rows_at_once):
                    rows = hidden_RH.index_select(0, sets.row_M[at]).to(wide).mul_(slope_M[at, None])
                    to_part.index_add_(0, sets.ids_M[at] - part.start, rows)
                if to_part.dtype != to_head.dtype:
                    to_head[part] = to_part
        to_hidden[work.large] = to_large
        return to_hidden.to(hidden_RH.dtype), to_head, None, None


class _Block(NamedTuple):
    """Rows of small sets of about one size, which gather the head together."""

    rows: Tensor
    at: Tensor  # int64 [rows, ids], where their ids are among those of all sets
    is_kept: Tensor  # bool, False for what fills up a row
    is_target: Tensor  # bool, the token that was sampled


class _Work:
    """The cut of a call: small sets in blocks, large ones by parts of the head, sets of one in neither."""

    def __init__(self, sets: _Sets, temperature: float, wide: torch.dtype, head_VH: Tensor) -> None:
        masks, device, width = sets.masks, head_VH.device, max(1, head_VH.shape[1])
        counts, numbers = masks.counts_ND[:, 0], BLOCK_NUMBERS["cuda" if device.type == "cuda" else "cpu"]
        self.sets, self.temperature, self.wide = sets, temperature, wide
        self.is_small = (counts > 1) & (counts * GATHERED_SHARE <= masks.num_choices)
        is_large = (counts != 1) & ~self.is_small
        self.large = to_device(np.flatnonzero(is_large), device)
        self.rows_at_once = max(1, numbers // width)
        step = max(1, numbers // max(width, len(self.large)))
        self.parts = [slice(at, min(at + step, masks.num_choices)) for at in range(0, masks.num_choices, step)]
        self.blocks = []
        small = np.argsort(-counts, kind="stable")
        small = small[self.is_small[small]]
        small_rows, start = to_device(small, device), 0
        while start < len(small):
            longest = int(counts[small[start]])
            rows = small_rows[start : start + max(1, self.rows_at_once // longest)]
            nth = torch.arange(longest, device=device)
            is_kept = nth < sets.counts_R[rows, None]
            at = (sets.begin_R[rows, None] + nth).where(is_kept, 0)
            self.blocks.append(_Block(rows, at, is_kept, is_kept & (sets.ids_M[at] == sets.targets_R[rows, None])))
            start += len(rows)
        self._large_by_id = self.sorted_by_id(is_large)
        numbers_of_large = torch.arange(len(self.large), device=device)
        self._in_large_R = torch.zeros_like(sets.counts_R).index_copy(0, self.large, numbers_of_large)

    def sorted_by_id(self, is_chosen_R: NDArray[np.bool_]) -> Sequence[Tensor]:
        """Say where, among those of all sets, the ids of some sets are that lie in each part of the head."""
        # on the host, which has the sets: the device is not asked how many ids a part gets
        masks = self.sets.masks
        at = join_ranges(masks.offsets[:-1][is_chosen_R], masks.counts_ND[is_chosen_R, 0])
        at = at[np.argsort(masks.ids[at], kind="stable")]
        begins = np.searchsorted(masks.ids[at], [part.start for part in self.parts])
        lengths = np.diff(begins, append=len(at)).tolist()
        return list(to_device(at, self.large.device).split_with_sizes(lengths))

    def heads_of(self, block: _Block, head_VH: Tensor) -> Tensor:
        """Gather the rows of the head for the sets of a block, [rows, ids, H]."""
        return head_VH.index_select(0, self.sets.ids_M[block.at].flatten()).view(*block.at.shape, head_VH.shape[1])

    def logits_of(self, block: _Block, hidden_RH: Tensor, head_VH: Tensor) -> Tensor:
        """Compute logits over the temperature [rows, ids], -inf for what fills up a row."""
        hidden = hidden_RH.index_select(0, block.rows)[:, :, None]
        logits = _product(self.heads_of(block, head_VH), hidden, self.wide)[:, :, 0].div_(self.temperature)
        return logits.masked_fill_(~block.is_kept, -torch.inf)

    def tile_of(self, number: int, large_hidden: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logits [large rows, part] over the temperature, and find the column of each token, if it is here."""
        sets, part, at = self.sets, self.parts[number], self._large_by_id[number]
        logits = _product(large_hidden, head_VH[part].T, self.wide).div_(self.temperature)
        left_out = (sets.counts_R[self.large] > 0)[:, None].repeat(1, logits.shape[1])
        left_out[self._in_large_R[sets.row_M[at]], sets.ids_M[at] - part.start] = False
        column = sets.targets_R[self.large] - part.start
        is_here = (column >= 0) & (column < logits.shape[1])
        return logits.masked_fill_(left_out, -torch.inf), column.clamp(0, logits.shape[1] - 1)[:, None], is_here


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """Multiply matrices, or batches of them, whose products are added up in the wide type."""
    if right.is_cuda and right.dtype == torch.bfloat16 and wide == torch.float32:
        # Tensor cores, which the CPU has no kernel for that hands on its sums unrounded.
        multiply: Any = torch.mm if right.ndim == 2 else torch.bmm
        product: Tensor = multiply(left.to(right.dtype), right, out_dtype=wide)
        return product
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
