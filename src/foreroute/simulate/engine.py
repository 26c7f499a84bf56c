"""Times of recompute or update of one expert-parallel group: the recurrence over its cells.

The ranks of a group meet in every all-to-all, so between two of them one clock is enough for all; the copy
engines and the links have clocks of their own. Events are taken in the order of their causes, so
each is computed once and exactly. Times are seconds from the start. Compiled (engine.cpp).

- A pass over a cell: attention and router | dispatch | experts | combine; the reverse in a backward pass. Each part
  begins when the one before has ended on all ranks of the group.
- The copy engine of a rank serves its fetches one after the other. A fetch begins when its slots are free and the cell
  `prefetch` cells before it has ended its attention. Experts of a rank begin when its own fetches are there.
- A link that all-to-alls use carries direct fetches and gradients while no all-to-all runs, fetches first, in the order
  of cells. All ranks wait for all direct fetches of a cell.
- Gradients return in the background; what is left of them at the end is waited for.
- `overlap` times its computing time, a pass hides its all-to-alls behind; for so long the links are taken.

The *order* of a cell is its number in execution: micro-step by micro-step through all layers, in the update forward and
back. Arrays over both ways have the axis K: 0 forward, 1 back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import PASSES
from foreroute.kernels import BOOL, FLOAT, INT, ArrayOf, StructOf, compiled

Floats = NDArray[np.float64]

PARTS = ("attention", "all-to-all", "experts", "fixed", "exposed transfers", "output head", "waiting for the plan")
"""Parts of the time of recompute and update, in this order."""


class PassWork(NamedTuple):
    """Work of a group in one pass of a step, in seconds: of its ranks, of the all-to-alls, and of what moves beside."""

    attention_MG2: Floats  # [M, G, 2], attention and all that is dense in a layer, forward and backward
    head_MG: Floats  # [M, G], the output head in a forward pass; backward takes twice as long
    all_to_all_ML: Floats  # [M, L], one all-to-all
    rows_ML2: Floats  # [M, L, 2], rows that all ranks together send in it, over their links inside nodes and over NICs
    experts_MLG2: Floats  # [M, L, G, 2], the experts, forward and backward
    layer_s: float  # fixed, of one pass over one layer
    host_KMLG: Floats  # [2, M, L, G], fetches by the copy engine from host memory, by way
    direct_KMLG4: Floats  # [2, M, L, G, 4], fetches over NIC out, NIC in, node link out, node link in, by way
    gradient_MLG4: Floats  # [M, L, G, 4], gradients that return over these links after the backward pass

    def forward_alone(self) -> PassWork:
        """The same without a way back: nothing is fetched on it, and no gradient returns."""
        is_forth = np.array([1.0, 0.0])
        return self._replace(
            host_KMLG=self.host_KMLG * is_forth[:, None, None, None],
            direct_KMLG4=self.direct_KMLG4 * is_forth[:, None, None, None, None],
            gradient_MLG4=np.zeros_like(self.gradient_MLG4),
        )

    def without_transfers(self) -> PassWork:
        """The same where weights and gradients move at no cost."""
        free = {name: np.zeros_like(getattr(self, name)) for name in ("host_KMLG", "direct_KMLG4", "gradient_MLG4")}
        return self._replace(**free)


class ExecutionModel(NamedTuple):
    """Execution on the cluster."""

    overlap: float  # share of its computing time behind which a pass over a cell hides its all-to-alls, 0 to 1
    prefetch: int  # cells that are fetched ahead
    keeps_slots: bool  # slots belong to layers, and are in use until the last cell of the layer has ended


class GroupRun(NamedTuple):
    """Recompute or update of one group."""

    parts_X: Floats  # [`PARTS`], seconds; they add up to `end_s`
    end_s: float  # seconds from the start to the last event, gradients included


def run(work: PassWork, model: ExecutionModel, *, pass_index: int, ready_s: float = 0.0) -> GroupRun:
    """Run recompute or update, by position in `costs.PASSES`; nothing runs before the plan is there, at `ready_s`."""
    passes_KF = np.array(PASSES[pass_index], np.int64)
    num_micro_steps, layers = work.all_to_all_ML.shape
    parts_X = np.zeros(len(PARTS))
    # of each cell in order, begin and end of each rank's copies from the host
    fetched_NG2 = np.zeros((num_micro_steps * len(passes_KF) * layers, work.head_MG.shape[1], 2))
    # arrays may be parts of others
    whole = PassWork._make(
        np.ascontiguousarray(one, np.float64) if isinstance(one, np.ndarray) else one for one in work
    )
    return GroupRun(parts_X, _run_group(passes_KF, ready_s, whole, model, parts_X, fetched_NG2))


_run_group = compiled(
    "run_group",
    ArrayOf(np.int64, 2),
    FLOAT,
    StructOf(
        attention_MG2=ArrayOf(np.float64, 3),
        head_MG=ArrayOf(np.float64, 2),
        all_to_all_ML=ArrayOf(np.float64, 2),
        rows_ML2=ArrayOf(np.float64, 3),
        experts_MLG2=ArrayOf(np.float64, 4),
        layer_s=FLOAT,
        host_KMLG=ArrayOf(np.float64, 4),
        direct_KMLG4=ArrayOf(np.float64, 5),
        gradient_MLG4=ArrayOf(np.float64, 4),
    ),
    StructOf(overlap=FLOAT, prefetch=INT, keeps_slots=BOOL),
    ArrayOf(np.float64, 1, filled=True),
    ArrayOf(np.float64, 3, filled=True),
    returns=FLOAT,
)
