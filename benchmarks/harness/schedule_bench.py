"""Host work of executing a plan: compiling the schedule of a rank, and what is left to do in a cell once it is at hand.

Tensors are of one element and messages are not sent, so that what is measured is the bookkeeping of both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from benchmarks.harness.pairs import seconds_in_turn
from foreroute import planner
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.slots import EMPTY, SlotSet
from foreroute.ep.transfer.transfers import Transfer, row_messages
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.simulate.workload import WORKLOADS

SLOTS = {"G64": 2, "E256": 8}
"""Redundant slots of each rank, by workload: 128 and 256 experts on 64 ranks."""
MICRO_STEPS, RANK = 4, 32
LINKS = Links(2e11, 5e10, 5e10, 5e-6, 2e-5)


class _Unposted:
    """Stands in for a `PeerGroup`: messages are made, and not sent."""

    rank = RANK

    def post(self, sends: list[Any], receives: list[Any], what: str) -> list[Any]:
        """Send nothing."""
        return []


def host_work(repeats: int) -> dict[str, dict[str, float]]:
    """Processor time by workload, medians: `schedule_us_per_cell` of a rank, `host_ms_per_cell` of a cell and pass."""
    compiling, indexing = {}, {}
    for name, slots in SLOTS.items():
        workload = replace(WORKLOADS[name], num_micro_steps=MICRO_STEPS)
        counts_MLGE = workload.draw(seed=0).counts()
        topology = Topology(workload.num_ranks, 8, slots, LINKS)
        plan = planner.plan(counts_MLGE, topology, PlanOptions(slots="shared"))

        compiled = partial(_compiled, plan, counts_MLGE)
        schedule, home = compiled(), {"weight": torch.zeros(workload.num_experts // workload.num_ranks, 1).unbind()}
        sets = [SlotSet(home, topology) for _ in range(workload.num_layers)]
        cells = workload.num_layers * MICRO_STEPS
        works: dict[str, Callable[[], object]] = {
            "compile": compiled,
            "index": partial(_index, plan, schedule, sets, home),
        }
        taken = seconds_in_turn(works, rounds=repeats, clock=time.process_time)
        compiling[name] = statistics.median(taken["compile"]) / cells * 1e6
        indexing[name] = statistics.median(taken["index"]) / cells / 2 * 1e3
    return {"schedule_us_per_cell": compiling, "host_ms_per_cell": indexing}


def _compiled(plan: StepPlan, counts_MLGE: Any) -> ExecutionSchedule:
    schedule = ExecutionSchedule(plan, counts_MLGE, RANK, paths="host")
    schedule.cell(MICRO_STEPS - 1, plan.shape[1] - 1)
    return schedule


def _index(
    plan: StepPlan, schedule: ExecutionSchedule, sets: list[SlotSet], home: Mapping[str, Sequence[torch.Tensor]]
) -> None:
    """A forward and a backward of every cell: who holds what, messages of weights twice, messages of gradients once."""
    peers = cast("PeerGroup", _Unposted())
    for micro_step in range(MICRO_STEPS):
        for layer, slots in enumerate(sets):
            moves = schedule.cell(micro_step, layer)
            moves.send_G.tolist(), moves.receive_G.tolist(), moves.group_rows_S.tolist()
            for _ in ("forward", "backward"):
                slots.held_GR.fill(EMPTY)
                slots.assign(Cell(0, micro_step, layer))
                cell = plan.cell(micro_step, layer)
                if not slots.holds(cell):
                    sends, hosted = slots.lacking(moves, RANK)
                    leaving, arriving = row_messages(sends, "row", home), row_messages(hosted, "slot", slots.rows)
                    Transfer(peers, "weights", leaving, arriving).post()
                    slots.enter(cell, fills_mine=len(hosted) > 0)
            grads = {"weight": torch.zeros(max(len(moves.hosted), len(moves.sends)), 1).unbind()}
            leaving, arriving = (row_messages(each, "position", grads) for each in (moves.hosted, moves.sends))
            Transfer(peers, "gradients", leaving, arriving).post()
