"""Log-probabilities of sampled tokens on the sets that they were drawn from, forward and gradient.

With the recorded set I of a row, its token y in I, logits l and temperature T:

    log p(y) = l_y / T - log Σ_{j in I} exp(l_j / T)
    d log p(y) / d l_j = ([j = y] - [j in I] p(j)) / T

Only temperature and set are used: what top-p, top-k or min-p would keep under the trainer's logits is another set.

`masked_logprobs` starts from the hidden states in front of the output head, and makes the logits of the sets alone:
rows of sets of about one size gather the head's rows, a chunk at a time. Rows of large sets and of none, which left
nothing out, make all logits, a tile of rows at a time. `masked_logprobs_of_logits` starts from logits that are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from foreroute.errors import BatchMismatchError, ConfigError, TraceContentError
from foreroute.replay.rows import to_device
from foreroute.trace import DecisionStream
from foreroute.trace.checks import join_ranges

CHUNK_NUMBERS = 1 << 24
"""Numbers of a gathered chunk, a part of the head, or a tile of logits: 64 MiB in float32. A CPU core takes as long
with a quarter or four times as much."""
GATHERED_SHARE = 64
"""A row gathers the head for sets of up to so small a part of all choices; larger ones are cheaper as a tile. Chosen by
hand: at H = 512, a CPU core took as long for one gathered logit as for about 90 of a matrix product."""


def masked_logprobs(
    hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute log-probabilities of sampled tokens on their recorded sets, without logits of all choices.

    The head is linear and without bias; for another one, and for logits that are capped, use
    `masked_logprobs_of_logits`. In bfloat16, products are made and added up in float32.

    Args:
        hidden_RH: floats [R, H], what the output head is put on.
        head_VH: floats [V, H], its weight; rows past the choices of the masks are padding.
        targets_R: integers [R], the token that was sampled at each row.
        masks: of the R rows: `trace.streams["sampling"].take(rows)`, where row p of a sequence predicts token p + 1.
        temperature: that the rollout divided logits by.

    Returns:
        float32 [R], float64 where hidden states or head are. Gradients reach hidden states and head.

    Raises:
        BatchMismatchError: when the shapes do not belong together, or a set lacks the token that was sampled.
        TraceContentError: when a row has no mask.
        ConfigError: when the temperature is not above 0.
    """
    if hidden_RH.ndim != 2 or head_VH.ndim != 2 or hidden_RH.shape[1] != head_VH.shape[1]:
        raise BatchMismatchError(
            f"hidden states have shape {tuple(hidden_RH.shape)} and the head {tuple(head_VH.shape)}; expected [R, H] "
            "and [V, H]"
        )
    tokens = _checked(len(hidden_RH), len(head_VH), targets_R, masks, temperature)
    with torch.autocast(hidden_RH.device.type, enabled=False):
        logprobs: Tensor = _OnSets.apply(hidden_RH, head_VH, _Work.of(masks, tokens, hidden_RH.shape[1]), temperature)
    return logprobs


def masked_logprobs_of_logits(
    logits_RV: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute log-probabilities of sampled tokens on their recorded sets from logits, of which no copy is made.

    Args:
        logits_RV: floats [R, V], as the model returns them.
        targets_R: as in `masked_logprobs`.
        masks: see there. Rows whose sets left nothing out are copied.
        temperature: see there.

    Returns:
        float32 [R], float64 where the logits are.

    Raises:
        BatchMismatchError, TraceContentError, ConfigError: as `masked_logprobs`.
    """
    tokens = _checked_logits(logits_RV, targets_R, masks, temperature)
    chosen_R = logits_RV.gather(1, to_device(tokens, logits_RV.device)[:, None])[:, 0]
    return chosen_R.to(_wide(logits_RV)) / temperature - _SetLogits.of(logits_RV, masks, temperature).log_sums_R


def masked_entropy_of_logits(
    logits_RV: Tensor, targets_R: Tensor, masks: DecisionStream, *, temperature: float = 1.0
) -> Tensor:
    """Compute the entropy of the distributions on recorded sets that tokens were drawn from, in nats.

    Args:
        logits_RV: floats [R, V], as the model returns them.
        targets_R: as in `masked_logprobs`.
        masks: see there.
        temperature: see there.

    Returns:
        float32 [R], float64 where the logits are.

    Raises:
        BatchMismatchError, TraceContentError, ConfigError: as `masked_logprobs`.
    """
    _checked_logits(logits_RV, targets_R, masks, temperature)
    kept = _SetLogits.of(logits_RV, masks, temperature)
    # -sum p log p = log Z - sum p l
    means_R = torch.zeros_like(kept.log_sums_R).index_add(
        0, kept.of_set, (kept.logits - kept.log_sums_R[kept.of_set]).exp() * kept.logits
    )
    if kept.all_logits is not None:
        whole = (kept.all_logits.softmax(-1) * kept.all_logits).sum(-1)
        means_R = means_R.index_copy(0, kept.rows, whole)
    return kept.log_sums_R - means_R


@dataclass(frozen=True)
class _SetLogits:
    """Logits over the temperature, of the sets alone.

    Attributes:
        logits: [ids of all sets].
        of_set: int64 [ids of all sets], the row of each.
        rows: int64 [r], the rows whose sets left nothing out.
        all_logits: [r, V], theirs; None where there is no such row.
        log_sums_R: [R], the logarithm of the sum of exp(logits) of each set.
    """

    logits: Tensor
    of_set: Tensor
    rows: Tensor
    all_logits: Tensor | None
    log_sums_R: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, masks: DecisionStream, temperature: float) -> _SetLogits:
        wide, device = _wide(logits_RV), logits_RV.device
        counts = masks.counts_ND[:, 0]
        begin_R = np.arange(len(counts), dtype=np.int64) * logits_RV.shape[1]
        of_set = to_device(np.repeat(np.arange(len(counts)), counts), device)
        picked = to_device(np.repeat(begin_R, counts) + masks.ids, device)
        kept = logits_RV.reshape(-1).index_select(0, picked).to(wide) / temperature
        # Sums are taken relative to the highest logit of each set.
        top_R = torch.full((len(counts),), -torch.inf, dtype=wide, device=device)
        top_R = top_R.scatter_reduce(0, of_set, kept.detach(), "amax")
        sums_R = torch.zeros_like(top_R).index_add(0, of_set, (kept - top_R[of_set]).exp())
        rows = to_device(np.flatnonzero(counts == 0), device)
        if not len(rows):
            return cls(kept, of_set, rows, None, top_R + sums_R.log())
        all_logits = logits_RV.index_select(0, rows)[:, : masks.num_choices].to(wide) / temperature
        # rows of no set have no highest logit and no sum: neutral ones, which are then replaced
        neutral = to_device(counts == 0, device)
        log_sums_R = top_R.masked_fill(neutral, 0) + sums_R.masked_fill(neutral, 1).log()
        log_sums_R = log_sums_R.index_copy(0, rows, all_logits.logsumexp(-1))
        return cls(kept, of_set, rows, all_logits, log_sums_R)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


@dataclass(frozen=True)
class _Chunk:
    """Rows that are worked on together.

    Attributes:
        rows: int64 [r].
        targets: int64 [r], where the token that was sampled stands in `ids`, or the token itself without `kept`.
        ids: int64 [r, m], the sets, padded; [r, 0] for rows that left nothing out.
        kept: bool [r, m], False for padding.
        gathered: whether the head is gathered; otherwise all logits are made.
    """

    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    ids: NDArray[np.int64]
    kept: NDArray[np.bool_]
    gathered: bool


@dataclass(frozen=True)
class _Work:
    """All rows in chunks, and the choices. Rows of sets of one are in none: their log-probability is 0."""

    chunks: list[_Chunk]
    num_choices: int

    @classmethod
    def of(cls, masks: DecisionStream, tokens: NDArray[np.int64], width: int) -> _Work:
        counts = masks.counts_ND[:, 0]
        order = np.argsort(-counts, kind="stable")
        gathers = (counts > 1) & (counts * GATHERED_SHARE <= masks.num_choices)
        large = (counts == 0) | ((counts > 1) & ~gathers)
        chunks = []
        for chosen, gathered in ((gathers, True), (large, False)):
            rows, start = order[chosen[order]], 0
            while start < len(rows):
                numbers = int(counts[rows[start]]) * width if gathered else masks.num_choices
                stop = start + max(1, CHUNK_NUMBERS // numbers)
                chunks.append(_chunk_of(masks, tokens, rows[start:stop], gathered=gathered))
                start = stop
        return cls(chunks, masks.num_choices)


def _chunk_of(masks: DecisionStream, tokens: NDArray[np.int64], rows: NDArray[np.int64], *, gathered: bool) -> _Chunk:
    counts = masks.counts_ND[rows, 0]
    kept = np.arange(int(counts.max())) < counts[:, None]
    ids = np.zeros(kept.shape, np.int64)
    ids[kept] = masks.ids[join_ranges(masks.offsets[rows], counts)]
    targets = tokens[rows]
    if gathered:
        targets = ((ids == targets[:, None]) & kept).argmax(axis=1)
    return _Chunk(rows, targets, ids, kept, gathered)


class _OnSets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, head_VH: Tensor, work: _Work, temperature: float) -> Tensor:
        wide = torch.promote_types(torch.promote_types(hidden_RH.dtype, head_VH.dtype), torch.float32)
        logprobs_R = torch.zeros(len(hidden_RH), dtype=wide, device=hidden_RH.device)
        log_sums = []
        for chunk in work.chunks:
            rows, targets = (to_device(each, hidden_RH.device) for each in (chunk.rows, chunk.targets))
            logits, _, _ = _logits_of(chunk, hidden_RH, head_VH, work.num_choices, temperature, wide)
            log_sums.append(logits.logsumexp(-1))
            logprobs_R[rows] = logits.gather(1, targets[:, None])[:, 0] - log_sums[-1]
        ctx.save_for_backward(hidden_RH, head_VH, *log_sums)
        ctx.work, ctx.temperature, ctx.wide = work, temperature, wide
        return logprobs_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, head_VH, *log_sums = ctx.saved_tensors
        choices = ctx.work.num_choices
        to_hidden = torch.zeros(hidden_RH.shape, dtype=ctx.wide, device=hidden_RH.device)
        to_head = torch.zeros(head_VH.shape, dtype=ctx.wide, device=head_VH.device) if ctx.needs_input_grad[1] else None
        for chunk, log_sum in zip(ctx.work.chunks, log_sums, strict=True):
            rows, targets = (to_device(each, hidden_RH.device) for each in (chunk.rows, chunk.targets))
            logits, hidden, gathered = _logits_of(chunk, hidden_RH, head_VH, choices, ctx.temperature, ctx.wide)
            scale = gradient_R[rows, None] / ctx.temperature
            # of the logits: minus their probability, and plus one for the token that was sampled
            slopes = logits.sub_(log_sum[:, None]).exp_().mul_(-scale)
            slopes.scatter_add_(1, targets[:, None], scale)
            if gathered is not None:
                to_hidden[rows] = torch.bmm(slopes[:, None], gathered)[:, 0]
                if to_head is not None:
                    torch.mul(slopes[:, :, None], hidden[:, None], out=gathered)  # the gathered head is done with
                    to_head.index_add_(0, to_device(chunk.ids.reshape(-1), rows.device), gathered.flatten(0, 1))
                continue
            own = torch.zeros_like(hidden)
            for first, after in _parts(head_VH, choices):
                part = slopes[:, first:after]
                own += part @ head_VH[first:after].to(ctx.wide)
                if to_head is not None:
                    to_head[first:after].addmm_(part.T, hidden)
            to_hidden[rows] = own
        return to_hidden.to(hidden_RH.dtype), None if to_head is None else to_head.to(head_VH.dtype), None, None


def _logits_of(
    chunk: _Chunk, hidden_RH: Tensor, head_VH: Tensor, choices: int, temperature: float, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logits over the temperature, -inf outside of the sets; hidden states [r, H]; the gathered head."""
    device = hidden_RH.device
    hidden = hidden_RH.index_select(0, to_device(chunk.rows, device)).to(wide)
    ids = to_device(chunk.ids, device)
    if chunk.gathered:
        gathered = head_VH.index_select(0, ids.reshape(-1)).to(wide).view(*ids.shape, -1)
        logits = torch.bmm(gathered, hidden[:, :, None])[:, :, 0].div_(temperature)
        return logits.masked_fill_(~to_device(chunk.kept, device), -torch.inf), hidden, gathered
    logits = torch.empty(len(hidden), choices, dtype=wide, device=device)
    for first, after in _parts(head_VH, choices):
        logits[:, first:after] = hidden @ head_VH[first:after].to(wide).T
    logits.div_(temperature)
    limited = chunk.kept.any(axis=1)
    if limited.any():
        left_out = torch.ones(logits.shape, dtype=torch.bool, device=device)
        left_out[to_device(np.nonzero(chunk.kept)[0], device), to_device(chunk.ids[chunk.kept], device)] = False
        left_out[to_device(np.flatnonzero(~limited), device)] = False
        logits.masked_fill_(left_out, -torch.inf)
    return logits, hidden, None


def _parts(head_VH: Tensor, choices: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_NUMBERS // max(1, head_VH.shape[1]))
    return [(first, min(first + step, choices)) for first in range(0, choices, step)]


def _checked_logits(
    logits_RV: Tensor, targets_R: Tensor, masks: DecisionStream, temperature: float
) -> NDArray[np.int64]:
    if logits_RV.ndim != 2:
        raise BatchMismatchError(f"logits have shape {tuple(logits_RV.shape)}; expected [R, V]")
    return _checked(len(logits_RV), logits_RV.shape[1], targets_R, masks, temperature)


def _checked(
    num_rows: int, num_logits: int, targets_R: Tensor, masks: DecisionStream, temperature: float
) -> NDArray[np.int64]:
    """Return the sampled tokens, int64 [R], once they are known to be in the sets of their rows."""
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
    tokens: NDArray[np.int64] = targets_R.detach().cpu().numpy().astype(np.int64)
    outside = ~masks.contains(tokens)
    if outside.any():
        row = int(outside.argmax())
        raise BatchMismatchError(
            f"the mask of row {row} leaves out its token {int(tokens[row])} ({int(outside.sum())} such rows); the "
            "masks belong to other tokens, or to other rows: that of token p + 1 stands in row p"
        )
    return tokens
