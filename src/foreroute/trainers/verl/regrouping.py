"""Micro-batches by routes: sequences change places between the micro-batches of their rank, before a plan is made.

verl splits the mini-batch of each data-parallel rank by lengths. Experts of a group of ranks take the rows of all of
these ranks at a time, so that the sequences of one micro-step on all ranks say how level experts are. Numbers of
micro-batches stay, verl's token budget holds, and verl is given the new indices, by which it restores the order of
outputs.

Axis letters: S sequences, D data-parallel ranks that share experts, G expert-parallel ranks, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from foreroute.adapters.megatron import RoutedMegatron
from foreroute.errors import ReplayError
from foreroute.layout import Packing, exchange_sequences
from foreroute.plan.counts import sequence_counts
from foreroute.trace import RoutingTrace, concatenate

WHAT = "packing by routes"
SQUARE_COST = 1 / 24576
"""Attention over projections, as verl's `calculate_workload` has it."""


class MicroBatches(NamedTuple):
    """The micro-batches of a batch of verl, in the order in which they run."""

    batches: list[Any]
    indices: list[list[int]]  # of each, the numbers of its sequences in the batch
    traces: list[RoutingTrace]


def regroup(
    routed: RoutedMegatron,
    data: Any,  # the batch
    batches: Sequence[Any],
    indices: Sequence[Sequence[int]],
    read_routes: Callable[[Any], RoutingTrace],  # of a micro-batch
    data_rank: int,  # ranks with the same one have the same sequences
) -> MicroBatches:
    """Level the experts of each micro-step, and return the new micro-batches. A collective call of all stages."""
    groups, size = routed.spread.groups, len(data)
    with groups.everyone.agree(WHAT, ReplayError) as vote:
        traces = [read_routes(each) for each in batches]
        vote.same(f"{len(batches)} micro-batches", "ranks that share experts have other numbers of micro-batches ({})")
        vote.numbers = (size,)
    of_batch = concatenate(traces).select(np.argsort(np.concatenate(indices)))
    most = int(vote.numbers_GN[:, 0].max())
    # every stage has the routes of all layers, and finds the same
    facts_SX, counts_SLE = np.full((most, 3), -1), np.zeros((most, *routed.home_LE.shape), np.int32)
    for number, sequences in enumerate(indices):
        facts_SX[sequences, 0] = number
    facts_SX[:size, 1], facts_SX[:size, 2] = of_batch.lengths, data_rank
    counts_SLE[:size] = sequence_counts(of_batch)
    facts_GSX, counts_GSLE = (
        groups.consensus.gather(torch.from_numpy(each), WHAT).numpy() for each in (facts_SX, counts_SLE)
    )
    # tensor- and context-parallel ranks have the same sequences
    data_ranks, first_D = np.unique(facts_GSX[:, 0, 2], return_index=True)
    is_there_DS = facts_GSX[first_D, :, 0] >= 0
    rank_S, facts_SX = np.nonzero(is_there_DS)[0].astype(np.int32), facts_GSX[first_D][is_there_DS]
    packing = exchange_sequences(
        Packing(facts_SX[:, 0].astype(np.int32), rank_S, len(batches), len(data_ranks)),
        facts_SX[:, 1],
        counts_GSLE[first_D][is_there_DS],
        homes=routed.home_LE,
        token_budget=data["max_token_len_per_gpu"] * tu.get_non_tensor_data(data, "sp_size", default=1),
        square_cost=SQUARE_COST,
    )
    # as verl has it: the cheapest at both ends, where stages of a pipeline wait
    cost_S = facts_SX[:, 1] * (1 + SQUARE_COST * facts_SX[:, 1])
    dearest_first = np.argsort(-np.bincount(packing.micro_step_S, cost_S, len(batches)), kind="stable")
    order = [*dearest_first[::2][::-1], *dearest_first[1::2]]
    mine = int(np.searchsorted(data_ranks, data_rank))
    new = [packing.sequences(number, mine) - int((rank_S < mine).sum()) for number in order]
    return MicroBatches(
        [tu.index_select_tensor_dict(data, sequences.tolist()) for sequences in new],
        [sequences.tolist() for sequences in new],
        [of_batch.select(sequences) for sequences in new],
    )
