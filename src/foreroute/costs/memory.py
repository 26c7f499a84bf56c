"""Bytes that a micro-step of an update peaks at, on every rank, known before it runs.

A micro-step is a row of sections: what comes before the routed layers, their forward, the head with the loss, their
backward, what comes behind. In each, memory is taken and given back by one program, whose blocks have as many bytes as
tokens, rows and replicas say. So memory behind its i-th allocation is a linear function of these, with coefficients
that a few small micro-steps tell exactly (`foreroute.adapters.hf.memory`); nothing is fitted to peaks.

Axis letters: M micro-steps, L routed layers, G ranks, I moments of a section, X sizes (`SIZES`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_array, whole_number
from foreroute.errors import CountsError, ForecastError
from foreroute.plan.received_rows import KnownRows
from foreroute.plan.step_plan import StepPlan

Work = Literal["home", "elsewhere", "here"]
"""Cells by replicas: without one on any rank, with some on other ranks alone, with some here."""
WORKS: tuple[Work, ...] = ("home", "elsewhere", "here")
SIZES = ("one", "tokens", "squares", "targets", "sent", "home_rows", "replica_rows", "replicas", "returned")
"""Terms of the bytes: 1; of the micro-batch its tokens with padding, the square of its width for each sequence,
and rows of logits; assignments that the rank sends; rows that its home experts and its replicas compute; replicas here,
and those elsewhere of experts that live here."""
MOST_BUDGET = 1 << 60


class BatchSizes(NamedTuple):
    """Sizes of micro-batches of the ranks, integers [M, G]."""

    tokens: NDArray[np.int64]  # with padding
    squares: NDArray[np.int64]  # sequences times width times width
    targets: NDArray[np.int64]  # rows of logits


class MemorySection(NamedTuple):
    """A part of a micro-step: bytes above those at its begin, by the sizes that they are linear in."""

    layer: int | None  # whose forward or backward it is; None before, between and behind the layers
    part: str
    # float64 [I, X] behind allocations, and [X] at its end
    by_work: Mapping[Work, tuple[NDArray[np.float64], NDArray[np.float64]]]


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Memory of a model in a micro-step of an update, as `measure_memory` finds it.

    Attributes:
        expert_bytes: weights of one expert, as a slot holds them.
        prefetch: cells ahead whose replicas are fetched.
        sections: in order of time.
    """

    expert_bytes: int
    prefetch: int
    sections: Sequence[MemorySection]

    @property
    def num_layers(self) -> int:
        """L."""
        return len({section.layer for section in self.sections} - {None})

    def forecast(
        self,
        known: KnownRows,
        sizes: BatchSizes,
        plan: StepPlan | None = None,
        *,
        resident: ArrayLike = 0,
        kept: StepPlan | None = None,
    ) -> MemoryForecast:
        """Forecast the peak of every rank in every micro-step of an update, when each holds gradients already.

        Args:
            known: rows of the pass, with room for those that are not known.
            sizes: integers [M, G].
            plan: of the pass, if it has replicas, whose slots take memory.
            resident: bytes of weights, gradients, optimizer and whatever else is on each rank, [G] or one number.
            kept: the plan of a recompute on the same weights, whose slots the update finds.

        Raises:
            CountsError: for sizes of other micro-steps or ranks.
            ForecastError: when the rows are of other layers, or the plan has replicas and none were measured.
        """
        if known.rows_MLG.shape[1] != self.num_layers:
            raise ForecastError(
                f"rows are of {known.rows_MLG.shape[1]} layers, and memory was measured of {self.num_layers}; hand in "
                "the rows of this model"
            )
        there = as_array(resident, name="resident", error=CountsError)
        if (
            there.shape not in ((), (known.sent_MG.shape[1],))
            or there.dtype.kind not in "iu"
            or there.min(initial=0) < 0
        ):
            raise CountsError(
                f"resident is {there.dtype} {list(there.shape)}; expected bytes, one integer or one for each of "
                f"{known.sent_MG.shape[1]} ranks"
            )
        begin_MG = np.full(known.sent_MG.shape, there, np.float64) + self._slots_M(plan, kept)[:, None]
        peak_MG, layer_MG = np.zeros_like(begin_MG), np.full(begin_MG.shape, -1)
        part_MG = np.full(begin_MG.shape, "", "U8")
        for section in self.sections:
            sizes_MGX, work_MG = section_sizes(known, sizes, section.layer)
            most_MG, end_MG = np.zeros((2, *begin_MG.shape))
            for number in np.unique(work_MG):
                if (found := section.by_work.get(WORKS[number])) is None:
                    raise ForecastError(
                        "the plan has replicas, and memory was measured without; measure it with redundant slots"
                    )
                some = work_MG == number
                most_MG[some] = (sizes_MGX[some] @ found[0].T).max(axis=1, initial=0)
                end_MG[some] = sizes_MGX[some] @ found[1]
            is_higher = begin_MG + most_MG > peak_MG
            peak_MG[is_higher] = (begin_MG + most_MG)[is_higher]
            layer_MG[is_higher], part_MG[is_higher] = -1 if section.layer is None else section.layer, section.part
            begin_MG += end_MG
        return MemoryForecast(np.ceil(peak_MG).astype(np.int64), layer_MG, part_MG)

    def _slots_M(self, plan: StepPlan | None, kept: StepPlan | None) -> NDArray[np.int64]:
        """Return the bytes of a rank's slots: layers have theirs from their first replica on, or its prefetch."""
        if plan is None:
            return np.zeros(1, np.int64)
        replicas_ML = plan.num_replicas_ML > 0
        num_layers, filled_ML = replicas_ML.shape[1], np.maximum.accumulate(replicas_ML, axis=0)
        if kept is not None:
            filled_ML |= (kept.num_replicas_ML > 0).any(axis=0)
        for m, filled_L in enumerate(filled_ML):
            # the engine looks as far for the next cells with replicas, behind the end of a micro-step too
            ahead = np.flatnonzero(replicas_ML[m + 1 : m + 3]) % num_layers
            filled_L[ahead[: self.prefetch]] = True
        sets_M = filled_ML.sum(axis=1)
        if plan.slots == "shared":
            sets_M = np.minimum(sets_M, 1 + self.prefetch)
        slots_M: NDArray[np.int64] = plan.topology.redundant_slots * sets_M * self.expert_bytes
        return slots_M


@dataclass(frozen=True, eq=False)
class MemoryForecast:
    """Peaks of a step, modelled.

    Attributes:
        bytes_MG: int64 [M, G], the peak of each rank in each micro-step.
        layer_MG: int64 [M, G], the routed layer that runs then; -1 for none.
        part_MG: str [M, G], what runs: "begin", "forward", "head", "backward" or "end".
    """

    bytes_MG: NDArray[np.int64]
    layer_MG: NDArray[np.int64]
    part_MG: NDArray[np.str_]

    def require(self, memory_budget: int) -> None:
        """Raise `ForecastError`, naming rank, micro-step and layer, where a peak is above these bytes of a rank."""
        budget = whole_number(memory_budget, name="memory_budget", most=MOST_BUDGET, error=CountsError)
        if self.bytes_MG.max(initial=0) <= budget:
            return
        m, g = np.unravel_index(int(self.bytes_MG.argmax()), self.bytes_MG.shape)
        layer, part = self.layer_MG[m, g], self.part_MG[m, g]
        where = f"the {part} of routed layer {layer}" if layer >= 0 else f"the {part}"
        raise ForecastError(
            f"rank {g} would take {self.bytes_MG[m, g]:,} bytes in micro-step {m}, in {where}, and may take {budget:,} "
            f"({int((self.bytes_MG > budget).sum())} of {self.bytes_MG.size} are above); take more micro-steps, "
            "checkpoint activations, or plan to level rows"
        )


def section_sizes(
    known: KnownRows, batches: BatchSizes, layer: int | None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Give the sizes that bytes of a section are linear in, [M, G, X], and the number in `WORKS`, [M, G]."""
    once = [_checked(name, each, known.sent_MG.shape) for name, each in batches._asdict().items()]
    # rows that are not known go to home experts
    home_MLG = known.reserved_MLG - known.replica_rows_MLG
    rows = (home_MLG, known.replica_rows_MLG, known.replicas_MLG, known.returned_MLG)
    of_layer = [each.sum(axis=1) if layer is None else each[:, layer] for each in rows]
    work_MG = np.zeros_like(known.sent_MG)
    if layer is not None:
        replicas_MG = of_layer[2]
        work_MG = np.where(replicas_MG > 0, 2, (replicas_MG.sum(axis=1, keepdims=True) > 0).astype(np.int64))
    columns = [np.ones_like(known.sent_MG), *once, known.sent_MG, *of_layer]
    return np.stack(columns, axis=-1).astype(np.float64), work_MG


def describe_section(
    layer: int | None, part: str, logs: Mapping[Work, Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]]
) -> MemorySection:
    """Find the coefficients of a section from micro-steps whose sizes differ.

    Args:
        layer: whose section it is, or None.
        part: as in `MemoryForecast.part_MG`.
        logs: what was seen, pairs of sizes [X] and of bytes above those at the begin, [I + 1], the last at the end.

    Raises:
        ForecastError: when the bytes are no linear function of the sizes.
    """
    by_work = {}
    for work, seen in logs.items():
        lengths = sorted({len(bytes_I) for _, bytes_I in seen})
        if len(lengths) > 1:
            raise _not_linear(layer, part, f"allocates {lengths[0] - 1} to {lengths[-1] - 1} blocks")
        sizes_NX, bytes_NI = np.array([one for one, _ in seen]), np.array([each for _, each in seen])
        scale_X = np.maximum(sizes_NX.max(axis=0), 1)
        found_XI = np.linalg.lstsq(sizes_NX / scale_X, bytes_NI, rcond=1e-9)[0]
        wrong = np.abs(sizes_NX / scale_X @ found_XI - bytes_NI).max()
        if wrong > max(1e-3 * np.abs(bytes_NI).max(), 4096):
            raise _not_linear(layer, part, f"is off by {wrong:,.0f} bytes")
        found_IX = np.round((found_XI / scale_X[:, None]).T, 3)
        by_work[work] = _highest(found_IX), found_IX[-1]
    return MemorySection(layer, part, by_work)


def _not_linear(layer: int | None, part: str, what: str) -> ForecastError:
    of = "" if layer is None else f" of routed layer {layer}"
    return ForecastError(
        f"the {part}{of} {what} in micro-batches of the same number of tokens and rows, so that its memory cannot be "
        'forecast; load the model with experts_implementation="grouped_mm", which computes all experts at once'
    )


def _highest(moments_IX: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leave out moments that another is at least as high as, whatever the sizes, which are 0 or more."""
    kept: list[NDArray[np.float64]] = []
    for moment_X in moments_IX[np.argsort(-moments_IX.sum(axis=1), kind="stable")]:
        if not any((other_X >= moment_X).all() for other_X in kept):
            kept = [other_X for other_X in kept if not (moment_X >= other_X).all()] + [moment_X]
    return np.array(kept)


def _checked(name: str, values: ArrayLike, shape: tuple[int, int]) -> NDArray[np.int64]:
    found = as_array(values, name=name, error=CountsError)
    if found.shape != shape or found.dtype.kind not in "iu" or found.min(initial=0) < 0:
        raise CountsError(
            f"{name} are {found.dtype} {list(found.shape)}; expected integers {list(shape)}, of each micro-step and "
            "rank"
        )
    return found.astype(np.int64)
