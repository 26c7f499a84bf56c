"""Deals sequences to ranks and micro-steps: packed under a token budget, or padded to batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import ConfigError, LayoutError
from foreroute.layout.by_routes import PackingCertificate, pack_by_routes
from foreroute.layout.router_rows import as_lengths, check_count
from foreroute.trace.checks import as_offsets


@dataclass(frozen=True, eq=False)
class Packing:
    """The micro-step and rank of each of S sequences.

    Attributes:
        micro_step_S: int32 [S], from 0.
        rank_S: int32 [S], the source rank, from 0.
        num_micro_steps: M. A micro-step may be empty, and a rank in it.
        num_ranks: G.
        certificate: how level a packing by routes is; None by length, and of a packing that was read.
    """

    micro_step_S: NDArray[np.int32]
    rank_S: NDArray[np.int32]
    num_micro_steps: int
    num_ranks: int
    certificate: PackingCertificate | None = None

    def __post_init__(self) -> None:
        if self.micro_step_S.shape != self.rank_S.shape or self.micro_step_S.ndim != 1:
            raise LayoutError(
                f"got micro-steps of shape {self.micro_step_S.shape} and ranks of shape {self.rank_S.shape}; "
                "expected one of each for every sequence"
            )
        if self.num_micro_steps < 1 or self.num_ranks < 1:
            raise LayoutError(
                f"got {self.num_micro_steps} micro-steps on {self.num_ranks} ranks; expected at least one of each"
            )

    def sequences(self, micro_step: int, rank: int) -> NDArray[np.int64]:
        """Return the sequences that a rank executes in a micro-step, int64, ascending."""
        return np.flatnonzero((self.micro_step_S == micro_step) & (self.rank_S == rank))

    def sums(self, values_S: NDArray[np.integer]) -> NDArray[Any]:
        """Sum numbers of sequences, [S, ...], by micro-step and rank: [M, G, ...], of the same type."""
        sums_MG = np.zeros((self.num_micro_steps, self.num_ranks, *values_S.shape[1:]), values_S.dtype)
        for m, rank, value in zip(self.micro_step_S, self.rank_S, values_S, strict=True):
            sums_MG[m, rank] += value
        return sums_MG


def pack_sequences(
    lengths: ArrayLike,
    num_ranks: int,
    token_budget: int,
    *,
    square_cost: float = 0.0,
    counts: ArrayLike | None = None,
    homes: ArrayLike | None = None,
    groups: int = 1,
) -> Packing:
    """Deal whole sequences to ranks and micro-steps, so that the ranks of a micro-step take equally long.

    A sequence of n tokens costs n + `square_cost` * n**2, for projections and the attention core. The dearest goes
    first, each to the cheapest of all M * G bins that has room. M is such that dealing to one micro-step fewer fails.

    With `counts`, pairs of sequences are exchanged then, while the sum over micro-steps and layers of the rank whose
    experts get most falls. The budget holds, M stays, and attention grows by 0.5 % at most, as do tokens of the longest
    ranks.

    Args:
        lengths: integers [S], tokens of each sequence.
        num_ranks: G; 1 for the micro-batches of one rank.
        token_budget: most tokens of a rank in a micro-step.
        square_cost: `CostModel.square_cost`, by which `foreroute plan` packs: 8192 / 37.7e6 by FLOPs for Qwen3-30B-A3B,
            more as its kernel is slower.
        counts: integers [S, L, E], assignments of each sequence (`foreroute.plan.sequence_counts`).
        homes: integers [L, E], the rank of each expert, from 0 in its group; equal blocks of experts by default.
        groups: expert-parallel groups, each of G / groups ranks that follow each other.

    Raises:
        LayoutError: when there is no sequence, or one alone exceeds the budget; for counts that do not fit the
            sequences, homes that do not fit the counts, and groups that do not divide the ranks.
        ConfigError: for a negative cost, and homes or groups without counts.
    """
    tokens_S = _lengths_within(lengths, token_budget)
    check_count(num_ranks, name="the number of ranks")
    if not len(tokens_S):
        raise LayoutError("there is no sequence to pack; expected at least one")
    cost_S = _attention(tokens_S, square_cost)
    check_count(groups, name="the number of groups")
    if counts is None and (homes is not None or groups > 1):
        raise ConfigError("homes and groups are for packing by routes; pass counts too, or leave them out")
    if num_ranks % groups:
        raise LayoutError(f"{num_ranks} ranks make no {groups} equal groups; expected a divisor")
    longest_first = np.argsort(-tokens_S, kind="stable")  # which is the dearest first
    bins, num_micro_steps = _deal(
        tokens_S[longest_first].tolist(), cost_S[longest_first].tolist(), num_ranks, token_budget
    )
    bin_S = np.empty(len(tokens_S), np.int64)
    bin_S[longest_first] = bins
    certificate = None
    if counts is not None:
        bin_S, certificate = pack_by_routes(
            counts,
            homes,
            bin_S,
            tokens_S,
            cost_S,
            num_micro_steps=num_micro_steps,
            num_ranks=num_ranks,
            token_budget=token_budget,
            groups=groups,
        )
    micro_step_S, rank_S = np.divmod(bin_S, num_ranks)
    return Packing(micro_step_S.astype(np.int32), rank_S.astype(np.int32), num_micro_steps, num_ranks, certificate)


def exchange_sequences(
    packing: Packing,
    lengths: ArrayLike,
    counts: ArrayLike,
    *,
    homes: ArrayLike | None = None,
    token_budget: int | None = None,
    padded: bool = False,
    square_cost: float = 0.0,
    keep_ranks: bool = True,
) -> Packing:
    """Exchange sequences of one expert-parallel group between micro-steps, by default on the rank that has them.

    Which rank sends a token to an expert changes nothing for the expert, only the micro-step does. So pairs of
    sequences, and whole micro-batches, change places on their rank while the sum over micro-steps and layers of the
    rank whose experts get most falls. Micro-steps stay as many; attention grows by 0.5 % at most.

    Args:
        packing: the rank and micro-step of each sequence to begin with, by length say.
        lengths: integers [S], tokens of each sequence.
        counts: integers [S, L, E], assignments of each sequence (`foreroute.plan.sequence_counts`).
        homes: integers [L, E], the rank of each expert, from 0; any number of ranks where sequences keep theirs. Equal
            blocks of experts on the packing's ranks by default.
        token_budget: most tokens of a rank in a micro-step; as many as the fullest has by default.
        padded: a micro-batch takes as much for each of its sequences as for its longest.
        square_cost: as in `pack_sequences`.
        keep_ranks: False where nobody has the sequences yet: pairs change ranks too, which finds up to 0.3 % more.

    Raises:
        LayoutError: for lengths, counts or homes that do not fit, bins beyond the packing's own, and a micro-batch
            above the budget.
        ConfigError: for a negative cost.
    """
    tokens_S = as_lengths(lengths, "lengths")
    num_micro_steps, num_ranks = packing.num_micro_steps, packing.num_ranks
    if len(tokens_S) != len(packing.micro_step_S):
        raise LayoutError(f"got {len(tokens_S)} lengths for a packing of {len(packing.micro_step_S)} sequences")
    sizes = (("micro-step", packing.micro_step_S, num_micro_steps), ("rank", packing.rank_S, num_ranks))
    for what, number_S, size in sizes:
        for s in np.flatnonzero((number_S < 0) | (number_S >= size))[:1]:
            raise LayoutError(
                f"sequence {s} is in {what} {number_S[s]} of a packing of {size}; expected 0 to {size - 1}"
            )
    if token_budget is not None:
        check_count(token_budget, name="the token budget", least=0)
    bin_S, certificate = pack_by_routes(
        counts,
        homes,
        packing.micro_step_S.astype(np.int64) * num_ranks + packing.rank_S,
        tokens_S,
        _attention(tokens_S, square_cost),
        num_micro_steps=num_micro_steps,
        num_ranks=num_ranks,
        token_budget=token_budget,
        stay=keep_ranks,
        padded=padded,
    )
    micro_step_S, rank_S = (each.astype(np.int32) for each in np.divmod(bin_S, num_ranks))
    return Packing(micro_step_S, rank_S, num_micro_steps, num_ranks, certificate)


def padded_batches(lengths: ArrayLike, token_budget: int, *, min_count: int = 0) -> list[NDArray[np.int64]]:
    """Cut sequences, in their order, into micro-batches [B, T] of at most `token_budget` tokens, padding included.

    Returns the sequences of each, int64: `min_count` or more, as data-parallel ranks must agree on a number.
    """
    tokens_S = _lengths_within(lengths, token_budget)
    if min_count > len(tokens_S):
        raise LayoutError(f"{len(tokens_S)} sequences cannot make {min_count} micro-batches; lower min_count")
    if not len(tokens_S):
        return []
    # a padded batch [B, T] takes B times its longest sequence
    bounds, longest = [0], 0
    for sequence, tokens in enumerate(tokens_S.tolist()):
        longest = max(longest, tokens)
        if (sequence + 1 - bounds[-1]) * longest > token_budget:
            bounds.append(sequence)
            longest = tokens
    bounds.append(len(tokens_S))
    while len(bounds) - 1 < min_count:
        bounds = _halve_heaviest(bounds, as_offsets(tokens_S))
    return np.split(np.arange(len(tokens_S)), bounds[1:-1])


def _lengths_within(lengths: ArrayLike, token_budget: int) -> NDArray[np.int64]:
    """Return the lengths, none of them above the budget."""
    tokens_S = as_lengths(lengths, "lengths")
    check_count(token_budget, name="the token budget", least=0)
    longest = int(tokens_S.max(initial=0))
    if longest > token_budget:
        raise LayoutError(
            f"sequence {int(tokens_S.argmax())} has {longest} tokens and the token budget is {token_budget}; "
            f"raise the budget to at least {longest}, or cut the sequence"
        )
    return tokens_S


def _attention(tokens_S: NDArray[np.int64], square_cost: float) -> NDArray[np.float64]:
    """Return what each sequence costs outside of experts, in tokens."""
    if not square_cost >= 0:
        raise ConfigError(f"square_cost is {square_cost}; expected 0 or more")
    each_S = tokens_S.astype(np.float64)
    return each_S + square_cost * each_S**2


def _halve_heaviest(bounds: list[int], sums: NDArray[np.int64]) -> list[int]:
    """Cut the heaviest micro-batch of several sequences as near to its middle as they allow."""
    edges = np.array(bounds)
    weight = np.where(np.diff(edges) > 1, np.diff(sums[edges]), -1)
    m = int(weight.argmax())
    inner = np.arange(bounds[m] + 1, bounds[m + 1])
    middle = (sums[bounds[m]] + sums[bounds[m + 1]]) / 2
    return sorted([*bounds, int(inner[np.abs(sums[inner] - middle).argmin()])])


def _deal(tokens: list[int], costs: list[float], num_ranks: int, token_budget: int) -> tuple[list[int], int]:
    """Return the bin of each sequence, micro-step * G + rank, and the number of micro-steps."""
    # by tokens more fit into tight budgets
    weightings: list[list[Any]] = [costs] if costs == tokens else [costs, tokens]

    @cache  # the number that is found was tried before
    def dealt(micro_steps: int) -> list[int] | None:
        for weights in weightings:
            bins = _to_lightest(tokens, weights, token_budget, micro_steps * num_ranks)
            if bins is not None:
                return bins
        return None

    # no packing has fewer micro-steps: all tokens have to fit, and two sequences above half the budget never do
    alone = sum(2 * count > token_budget for count in tokens)
    fewest = max(1, -(-sum(tokens) // max(1, num_ranks * token_budget)), -(-alone // num_ranks))
    num_micro_steps = _first_that_works(fewest, dealt)
    bins = dealt(num_micro_steps)
    assert bins is not None, "the number was found by dealing"
    return bins, num_micro_steps


def _first_that_works(least: int, attempt: Callable[[int], list[int] | None]) -> int:
    """Return the first number from `least` on with which an attempt works."""
    # An attempt takes as long as dealing once, and what works once mostly works with every larger number: distances are
    # doubled up to a number that works, then halved, so that attempts are few and the one before the result fails.
    most, step = least, 1
    while attempt(most) is None:
        least, most, step = most + 1, most + step, 2 * step
    while least < most:
        middle = (least + most) // 2
        least, most = (middle + 1, most) if attempt(middle) is None else (least, middle)
    return most


def _to_lightest(
    tokens: list[int],  # of each sequence, descending: where one found no room, only a later and shorter one can
    weights: list[Any],  # of each sequence
    token_budget: int,  # most tokens of a bin
    bins: int,  # number of bins
) -> list[int] | None:
    """Give each sequence in turn to the first of the lightest bins with room; None when one has room nowhere."""
    held = [0] * bins
    chosen: list[int] = []
    opened = 0  # bins from here on are empty
    lightest: list[tuple[float, int]] = []  # a heap by weight; those that may have room
    full: list[tuple[int, float, int]] = []  # a heap by tokens held; none had room for the sequence before
    for count, weight in zip(tokens, weights, strict=True):
        while full and full[0][0] + count <= token_budget:
            _, filled, number = heapq.heappop(full)
            heapq.heappush(lightest, (filled, number))
        while lightest and held[lightest[0][1]] + count > token_budget:
            filled, number = heapq.heappop(lightest)
            heapq.heappush(full, (held[number], filled, number))
        if opened < bins and (not lightest or lightest[0][0] > 0):
            filled, number, opened = 0.0, opened, opened + 1
        elif lightest:
            filled, number = heapq.heappop(lightest)
        else:
            return None
        heapq.heappush(lightest, (filled + weight, number))
        held[number] += count
        chosen.append(number)
    return chosen
