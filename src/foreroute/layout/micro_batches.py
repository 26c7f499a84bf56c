"""Micro-batches under a token budget, and the permutation back."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import LayoutError
from foreroute.layout.slots import MOST_ROUTER_SLOTS, as_lengths
from foreroute.trace.checks import as_offsets


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """S sequences dealt to M micro-batches, none of which is empty.

    Attributes:
        order_S: int64 [S], sequence numbers in the order of execution.
        offsets: int64 [M + 1], micro-batch m executes `order_S[offsets[m]:offsets[m + 1]]`.
    """

    order_S: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        """M, the number of micro-batches."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """The sequences of each micro-batch in turn."""
        return (self.sequences(m) for m in range(len(self)))

    def __repr__(self) -> str:
        return f"MicroBatches({len(self)} of {len(self.order_S)} sequences)"

    def sequences(self, micro_batch: int) -> NDArray[np.int64]:
        """The sequences of one micro-batch, for `pack(..., sequences=)`, `pad` or `trace.select`."""
        return self.order_S[self.offsets[micro_batch] : self.offsets[micro_batch + 1]]

    @property
    def restore_S(self) -> NDArray[np.int64]:
        """int64 [S], the way back: `results_in_order_of_execution[restore_S]` stands in the order of the batch."""
        restore = np.empty_like(self.order_S)
        restore[self.order_S] = np.arange(len(self.order_S))
        return restore

    @property
    def micro_step_S(self) -> NDArray[np.int64]:
        """int64 [S], the micro-batch of each sequence, for `count_assignments`."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))[self.restore_S]


def by_token_budget(
    lengths: ArrayLike,
    budget: int,
    *,
    balanced: bool = False,
    padded: bool = False,
    align: int = 1,
    min_count: int = 0,
) -> MicroBatches:
    """Deal sequences to micro-batches of at most `budget` tokens.

    Args:
        lengths: integers [S], tokens per sequence.
        budget: most tokens of a micro-batch, padding by `align` included.
        balanced: False keeps the order of the batch and fills each micro-batch before the next. True deals the longest
            sequence first, always to the lightest micro-batch, so that all take about as long; a micro-batch then lists
            its sequences in the order of the batch.
        padded: count a micro-batch as its sequences times its longest, as a padded [B, T] batch takes them. Not with
            `balanced`, which mixes long and short sequences and would count mostly padding.
        align: a sequence counts as its length rounded up to a multiple of this, as in `pack`.
        min_count: make at least as many micro-batches: data-parallel ranks must agree on the number, or they hang.

    Raises:
        LayoutError: when a sequence alone exceeds the budget, or there are fewer sequences than `min_count`.
    """
    if balanced and padded:
        raise LayoutError("balanced micro-batches mix lengths, so padding would fill them; drop `balanced` or `padded`")
    cost_S = as_lengths(lengths, "lengths")
    if not 1 <= align <= MOST_ROUTER_SLOTS:
        raise LayoutError(f"align is {align}; expected 1 to {MOST_ROUTER_SLOTS}")
    cost_S = as_lengths(-(-cost_S // align) * align, "aligned lengths")
    if (cost_S > budget).any():
        s = int(np.argmax(cost_S > budget))
        raise LayoutError(
            f"sequence {s} needs {int(cost_S[s])} tokens and a micro-batch may hold {budget}; "
            f"raise the budget to at least {int(cost_S.max())}, or cut the sequence"
        )
    if min_count > len(cost_S):
        raise LayoutError(f"{len(cost_S)} sequences cannot make {min_count} micro-batches; lower min_count")
    if not len(cost_S):
        return MicroBatches(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if balanced:
        return _longest_first(cost_S, budget, min_count)
    bounds = _fill_padded(cost_S.tolist(), budget) if padded else _fill(as_offsets(cost_S), budget)
    while len(bounds) - 1 < min_count:
        bounds = _halve_heaviest(bounds, as_offsets(cost_S))
    return MicroBatches(np.arange(len(cost_S)), np.array(bounds, dtype=np.int64))


def _fill(sums: NDArray[np.int64], budget: int) -> list[int]:
    """Bounds of micro-batches that are each filled, in order, as far as the budget goes.

    They grow, since no sequence alone exceeds the budget.
    """
    bounds = [0]
    while bounds[-1] < len(sums) - 1:
        bounds.append(int(np.searchsorted(sums, sums[bounds[-1]] + budget, side="right")) - 1)
    return bounds


def _fill_padded(costs: list[int], budget: int) -> list[int]:
    """The same, where every sequence takes as many tokens as the longest of its micro-batch."""
    bounds, longest = [0], 0
    for sequence, cost in enumerate(costs):
        longest = max(longest, cost)
        if (sequence + 1 - bounds[-1]) * longest > budget:
            bounds.append(sequence)
            longest = cost
    return [*bounds, len(costs)]


def _halve_heaviest(bounds: list[int], sums: NDArray[np.int64]) -> list[int]:
    """Cut the heaviest micro-batch of several sequences as near to its middle as they allow."""
    edges = np.array(bounds)
    weight = np.where(np.diff(edges) > 1, np.diff(sums[edges]), -1)
    m = int(weight.argmax())
    inner = np.arange(bounds[m] + 1, bounds[m + 1])
    middle = (sums[bounds[m]] + sums[bounds[m + 1]]) / 2
    return sorted([*bounds, int(inner[np.abs(sums[inner] - middle).argmin()])])


def _longest_first(cost_S: NDArray[np.int64], budget: int, min_count: int) -> MicroBatches:
    # from the fewest that could hold all tokens; by 1/64 more at a time, since an attempt takes as long as the answer
    count = max(min_count, -(-int(cost_S.sum()) // budget) if budget else 1, 1)
    longest_first = np.argsort(-cost_S, kind="stable")
    costs = cost_S[longest_first].tolist()
    while (dealt := _deal(costs, budget, count)) is None:
        count = min(count + max(1, count // 64), len(costs))
    micro_step_S = np.empty(len(costs), np.int64)
    micro_step_S[longest_first] = dealt
    return MicroBatches(
        np.argsort(micro_step_S, kind="stable"), as_offsets(np.bincount(micro_step_S, minlength=count).astype(np.int64))
    )


def _deal(costs: list[int], budget: int, count: int) -> list[int] | None:
    """The micro-batch of each cost, or None when one fits nowhere. Ties go to the one with the fewest sequences."""
    lightest = [(0, 0, m) for m in range(count)]
    dealt = []
    for cost in costs:
        tokens, held, m = lightest[0]
        if tokens + cost > budget:
            return None
        heapq.heapreplace(lightest, (tokens + cost, held + 1, m))
        dealt.append(m)
    return dealt
