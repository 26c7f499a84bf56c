"""Several expert-parallel groups of one model, where each expert is kept by one rank of all of them.

Letters: A groups of G expert-parallel ranks, W = A · G ranks; L routed layers, E experts, V replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.ep.agreement import RankConsensus
from foreroute.plan import StepPlan
from foreroute.plan.hosts import Hosts


def owners_at(home_LE: NDArray[np.int16], num_groups: int, num_ranks: int) -> NDArray[np.int16]:
    """Return int16 [L, E], which of W ranks owns each expert: a block of those of its home, in order of id."""
    num_local = home_LE.shape[1] // num_ranks
    owner_LE = np.empty_like(home_LE)
    # as torch.chunk, and so FSDP2, cuts them: the last groups may have fewer, or none
    blocks = np.arange(num_local, dtype=np.int16) // np.int16(-(-num_local // num_groups)) * np.int16(num_ranks)
    for owner_E, home_E in zip(owner_LE, home_LE, strict=True):
        for rank in range(num_ranks):
            owner_E[home_E == rank] = blocks + rank
    return owner_LE


def join_plans(
    plans: Sequence[StepPlan],  # of this group, for each pass
    owner_LE: NDArray[np.int16],
    everyone: RankConsensus,
    first: int,
    num_replicas_W: NDArray[np.int64],  # of all `plans` of each rank's group
) -> list[StepPlan]:
    """Join the transfers of all groups into plans of W ranks with owners as homes. A collective call of `everyone`.

    Replicas are fetched from owners. Their gradients go to the home in the group of the replica, whose first rank is
    number `first` of all, and from there the way of its own, to the owner.
    """
    num_ranks, room = plans[0].topology.num_ranks, int(num_replicas_W.max())
    mine = np.zeros((room, 6), np.int32)
    columns = [_columns(number, plan.hosts, first) for number, plan in enumerate(plans)]
    mine[: num_replicas_W[first]] = np.concatenate(columns)
    table = np.zeros((everyone.size, 0, 6), np.int32)
    if room:
        table = everyone.gather(torch.from_numpy(mine), "joining plans of groups").numpy()
    # what one rank of each group says is what all of it say
    rows = np.concatenate([table[at, : num_replicas_W[at]] for at in range(0, everyone.size, num_ranks)])
    joined = []
    for number, plan in enumerate(plans):
        cell_V, expert_V, rank_V, slot_V, fetched_V = rows[rows[:, 0] == number, 1:].T
        order_V, hosts = np.argsort(cell_V, kind="stable"), plan.hosts
        joined_hosts = Hosts(
            owner_LE,
            np.searchsorted(cell_V[order_V], np.arange(len(hosts.offsets))),
            expert_V[order_V].astype(hosts.expert_R.dtype),
            rank_V[order_V].astype(hosts.rank_R.dtype),
            slot_V[order_V].astype(hosts.slot_R.dtype),
            fetched_V[order_V].astype(hosts.fetched_R.dtype),
            np.zeros((len(cell_V), everyone.size), np.int32),
        )
        joined.append(replace(plan, topology=replace(plan.topology, num_ranks=everyone.size), hosts=joined_hosts))
    return joined


def _columns(number: int, hosts: Hosts, first: int) -> NDArray[np.int32]:
    """Return int32 [V, 6]: the pass, cell, expert, rank among all, slot, and whether it is fetched."""
    cell_V = hosts.cell_R
    expert_V, rank_V, slot_V, fetched_V = (each[: len(cell_V)].astype(np.int32) for each in hosts[2:6])
    pass_V = np.full_like(cell_V, number)
    return np.stack([pass_V, cell_V, expert_V, rank_V + first, slot_V, fetched_V], axis=1).astype(np.int32)
