"""A plan and its counts, compiled for one rank: what it sends, receives, computes and copies in every cell.

An *assignment* is one pick of one token. A rank sorts its assignments by expert, stable; the first of an expert go to
its home, the next to its replicas in ascending order of their rank, as many to each as the plan says. What is sent is
in order of (target rank, group); a *group* is what one rank computes with one expert's weights: its home experts in
ascending order of their id, then its replicas in ascending order of their slot. What is received is in order of
(source rank, group), what is computed in order of (group, source rank). So rows of a group are always in order of
(source rank, token, pick), whatever else is on the rank. No token is looked at, and no framework is known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import PlanError
from foreroute.kernels import INT, NONE, ArrayOf, StructOf, compiled
from foreroute.plan.capabilities import FetchPath, takes_host_memory
from foreroute.plan.hosts import HOSTS, CellPlan, Hosts
from foreroute.plan.step_plan import StepPlan

MOVE = np.dtype(
    [(name, np.int32) for name in ("round", "number", "expert", "row", "peer", "slot", "position")]
    + [("by_host", np.bool_)],
    align=True,
)
"""One replica's way, seen from one of its two ends.

round: in a round no rank sends two experts and none receives two; there are as few rounds as can be.
number: of the replica in its cell, the same at both ends.
expert: logical.
row: of the expert in its home rank's shard, whose experts are in ascending order of their id.
peer: the rank at the other end.
slot: that holds the replica, on the rank that hosts it.
position: of a replica that is hosted, among those of this rank in ascending order of slot; of one that is sent, among
the gradients that return to this rank, in order of (row, peer), in which they are added.
by_host: whether its weights go through host memory; gradients never do.
"""


@dataclass(frozen=True, eq=False)
class CellSchedule:
    """Work of one rank in one cell.

    Segments of rows are int64 [B, 2]: first row and length, in the order in which they are taken; none is empty.
    """

    send_G: NDArray[np.int64]  # [G], rows to each rank
    receive_G: NDArray[np.int64]  # [G], rows from each rank
    # int64 [S], rows of every group. Where home experts, or replicas, get none at all, the first has one of padding: a
    # grouped GEMM is never given an empty input
    group_rows_S: NDArray[np.int64]
    num_home: int  # number of groups that are home experts; the others are replicas
    # of this rank's assignments sorted by expert: those that are sent, in the order of sending
    send_segments: NDArray[np.int64]
    # of the received rows: those that are computed, in that order. A segment that starts at the number of received rows
    # is padding
    expert_segments: NDArray[np.int64]
    return_segments: NDArray[np.int64]  # of the computed rows: those that are sent back, in order of arrival
    sends: NDArray[np.void]  # `MOVE`s of the replicas whose home is here, in order of round
    hosted: NDArray[np.void]  # `MOVE`s of the replicas here, in order of round

    @classmethod
    def of(
        cls,
        cell: CellPlan,  # homes and replicas
        counts_GE: NDArray[np.integer],  # integers [G, E], assignments of every rank to every expert
        rank: int,  # whose schedule
        *,
        what: str = "the cell",  # the cell in words, for errors
    ) -> CellSchedule:
        """Compile the schedule of a cell whose counts are learnt only when it runs, with no move by host memory."""
        return _compile(Hosts.of_cells(cell.home_E[None], [cell]), counts_GE[None], rank, 1, [what]).cell(0)


class _Block(NamedTuple):
    """The schedules of C cells as flat arrays, which a compiled loop fills (schedule.cpp)."""

    send_CG: NDArray[np.int64]
    receive_CG: NDArray[np.int64]
    group_rows_CS: NDArray[np.int64]
    num_groups_C: NDArray[np.int64]
    num_home: int
    send_segments: NDArray[np.int64]
    expert_segments: NDArray[np.int64]
    return_segments: NDArray[np.int64]
    sends: NDArray[np.void]
    hosted: NDArray[np.void]
    ends_CX: NDArray[np.int64]  # where the part of each cell ends in these five

    def cell(self, c: int) -> CellSchedule:
        """Return the schedule of one cell, as views."""
        begins = self.ends_CX[c - 1] if c else np.zeros(5, np.int64)
        bounds = zip(self[5:10], begins.tolist(), self.ends_CX[c].tolist(), strict=True)
        parts: list[Any] = [array[begin:end] for array, begin, end in bounds]
        rows_S = self.group_rows_CS[c, : self.num_groups_C[c]]
        return CellSchedule(self.send_CG[c], self.receive_CG[c], rows_S, self.num_home, *parts)


_MOVES = ArrayOf(MOVE, 1, filled=True)
_FILLED, _FILLED_2 = (ArrayOf(np.int64, ndim, filled=True) for ndim in (1, 2))
_BLOCK = StructOf(
    send_CG=_FILLED_2,
    receive_CG=_FILLED_2,
    group_rows_CS=_FILLED_2,
    num_groups_C=_FILLED,
    num_home=INT,
    send_segments=_FILLED_2,
    expert_segments=_FILLED_2,
    return_segments=_FILLED_2,
    sends=_MOVES,
    hosted=_MOVES,
    ends_CX=_FILLED_2,
)
_schedule_cells = compiled("schedule_cells", INT, HOSTS, ArrayOf(np.int32, 3), INT, _BLOCK, _FILLED, returns=INT)


class ExecutionSchedule:
    """The schedule of one rank for all cells of a step, compiled in a thread, the first micro-step first.

    Args:
        plan: of the step.
        counts_MLGE: integers [M, L, G, E], what was planned, of the whole step.
        rank: whose schedule.
        paths: which path weights take.
    """

    def __init__(
        self, plan: StepPlan, counts_MLGE: NDArray[np.integer], rank: int, *, paths: FetchPath = "direct"
    ) -> None:
        num_micro_steps, num_layers = plan.shape[:2]
        memory_ranks = plan.topology.ranks_per_node if takes_host_memory(paths) else 1

        def block(m: int) -> list[CellSchedule]:
            hosts = plan.hosts.part(m, m + 1)
            words = [f"micro-step {m}, routed layer {layer}" for layer in range(num_layers)]
            compiled = _compile(hosts, counts_MLGE[m], rank, memory_ranks, words)
            return [compiled.cell(layer) for layer in range(num_layers)]

        # the first micro-step can run while the others are compiled
        self._blocks: list[Future[list[CellSchedule]]] = [_compiler().submit(block, m) for m in range(num_micro_steps)]

    def cell(self, micro_step: int, layer: int) -> CellSchedule:
        """Give the schedule of one cell, once its micro-step is compiled.

        Raises:
            PlanError: on all ranks alike, when replicas are to serve more assignments of an expert than there are, or
                the plan names what is not there.
        """
        return self._blocks[micro_step].result()[layer]


@cache
def _compiler() -> ThreadPoolExecutor:
    """Return the thread of all schedules: to start one takes longer than to compile ten cells."""
    return ThreadPoolExecutor(1, thread_name_prefix="schedule")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compiler.cache_clear)  # threads do not live on in a forked process


def _compile(
    hosts: Hosts, counts_CGE: NDArray[np.integer], rank: int, memory_ranks: int, words: Sequence[str]
) -> _Block:
    """Fill a block for cells, and refuse what is not there, and replicas that serve more than there is.

    `memory_ranks` neighbouring ranks send weights through host memory; 1 has all go from peer to peer.
    """
    num_cells, num_ranks, num_experts = counts_CGE.shape
    num_home = num_experts // num_ranks
    num_replicas, most_groups = len(hosts.expert_R), num_home + int(hosts.slot_R.max(initial=-1)) + 1
    out = _Block(
        np.empty((num_cells, num_ranks), np.int64),
        np.empty((num_cells, num_ranks), np.int64),
        np.empty((num_cells, most_groups), np.int64),
        np.empty(num_cells, np.int64),
        num_home,
        np.empty((num_cells * num_experts + num_replicas, 2), np.int64),
        np.empty((num_cells * most_groups * (num_ranks + 1), 2), np.int64),
        np.empty((num_cells * most_groups * num_ranks, 2), np.int64),
        np.empty(num_replicas, MOVE),
        np.empty(num_replicas, MOVE),
        np.empty((num_cells, 5), np.int64),
    )
    counts = np.ascontiguousarray(counts_CGE, np.int32)
    wrong = np.empty(3, np.int64)
    cell = _schedule_cells(rank, hosts, counts, memory_ranks, out, wrong)
    if cell != NONE:
        expert, source, excess = wrong
        if expert == NONE:
            raise PlanError(
                f"{words[cell]}: {hosts._fields[source]} of the plan names what is not there, or does not fit the "
                "counts; foreroute.plan.verify says more. Take a plan that it accepts"
            )
        raise PlanError(
            f"{words[cell]}: replicas of expert {expert} are to serve {excess} assignments of rank {source} more than "
            "there are; the plan was made for other counts"
        )
    return out
