"""When everything happens in one stage of the step, for one expert-parallel group: the recurrence over its cells.

The ranks of a group meet in every all-to-all, so between two of them one clock is enough for all; the copy
engines, the links and the pipeline stages have clocks of their own. Events are taken in the order of their causes, so
each is computed once and exactly. Times are seconds from the start of the stage.

- A pass over a cell: attention and router | dispatch | experts | combine; the reverse in a backward pass. Each part
  begins when the one before has ended on all ranks of the group.
- The copy engine of a rank serves its fetches one after the other. A fetch begins when its slots are free and the cell
  `prefetch` places before it has ended its attention. Experts of a rank begin when its own fetches are there.
- A link that all-to-alls use carries direct fetches and gradients while no all-to-all runs, fetches first, in the order
  of cells. All ranks wait for all direct fetches of a cell.
- Gradients return in the background; what is left of them at the end of the stage is waited for.
- `overlap` times its computing time, a pass hides its all-to-alls behind; for so long the links are taken.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import STAGES
from foreroute.simulate.cell_costs import Compute, StagePass, Transfers

Floats = NDArray[np.float64]

PARTS = (
    "attention",
    "all-to-all",
    "experts",
    "fixed",
    "exposed transfers",
    "output head",
    "waiting for the plan",
    "pipeline bubbles",
)
"""Parts of the time of a pipeline stage, in this order."""


class ExecutionModel(NamedTuple):
    """How the cluster executes.

    Attributes:
        overlap: share of its computing time behind which a pass over a cell hides its all-to-alls, 0 to 1.
        prefetch: cells that are fetched ahead.
        keeps_slots: slots belong to layers, and are in use until the last cell of the layer has ended.
    """

    overlap: float
    prefetch: int
    keeps_slots: bool


@dataclass(frozen=True, eq=False)
class StageRun:
    """One stage of the step on one group.

    Attributes:
        parts_PX: [pipeline stages, `PARTS`], seconds; they add up to `end_P`.
        end_P: [pipeline stages], seconds from the start to the last event, gradients included.
        times_PNX: [pipeline stages, cells in their order, 10], seconds: begin and end of each part, of both passes;
            the second is NaN where there is none.
        fetched_PNG2: [pipeline stages, cells in their order, G, 2], begin and end of each rank's copies from the host.
        direct_end_PN: [pipeline stages, cells in their order], when the cell's direct fetches had all arrived.
    """

    parts_PX: Floats
    end_P: Floats
    times_PNX: Floats
    fetched_PNG2: Floats
    direct_end_PN: Floats


def run(
    orders: Sequence[Sequence[StagePass]],
    layer_ranges: Sequence[range],
    compute: Compute,
    transfers: Transfers,
    model: ExecutionModel,
    *,
    stage: int,
    ready_M: Floats | None = None,
) -> StageRun:
    """Run one stage.

    Args:
        orders: of stage passes, for each pipeline stage.
        layer_ranges: layers of each pipeline stage.
        compute: of all cells.
        transfers: of all cells, each pipeline stage's by its own order.
        model: how the cluster executes.
        stage: position in `costs.STAGES`.
        ready_M: when the plan of each micro-step is there; from the start by default.
    """
    from foreroute.simulate import engine_kernels

    num_micro_steps = len(compute.all_to_all_ML)
    passes_PVK = np.array(
        [[(int(stage_pass.backward), stage_pass.micro_step) for stage_pass in order] for order in orders], np.int64
    )
    bounds = np.array([layer_ranges[0].start, *(layers.stop for layers in layer_ranges)], np.int64)
    passes_per_kind_KF = np.zeros((2, 2), np.int64)
    passes_per_kind_KF[: len(STAGES[stage])] = STAGES[stage]
    ready = np.zeros(num_micro_steps) if ready_M is None else ready_M
    work = Work(*(np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one for one in (*compute, *transfers)))
    found = engine_kernels.run(passes_PVK, bounds, passes_per_kind_KF, ready, work, model)
    return StageRun(*found)


Work = namedtuple("Work", (*Compute._fields, *Transfers._fields))  # type: ignore[misc]  # fields of two records
"""`Compute` and `Transfers`, for compiled code."""
