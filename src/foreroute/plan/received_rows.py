"""The rows that every rank receives in every cell, known before the step, and what others reserve for them.

A *row* is an assignment that arrives at the rank that serves it. Axis letters: M micro-steps, L layers, G ranks,
E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array, whole_number
from foreroute.errors import CountsError, PlanError
from foreroute.layout import Packing
from foreroute.plan.counts import check_counts, packed_counts
from foreroute.plan.hosts import Hosts
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import check_homes
from foreroute.trace.container import RoutingTrace

SLACK = 1.10
"""The usual factor over the mean: the default of Megatron-Core's stash, for one."""
LARGEST_ALIGN = 1 << 16


def known_rows(
    step: RoutingTrace | Sequence[RoutingTrace] | ArrayLike,
    placement: StepPlan | ArrayLike,
    *,
    packing: Packing | None = None,
    top_k: int | None = None,
    native_MG: ArrayLike | None = None,
    align: int = 1,
) -> KnownRows:
    """Count the rows that each rank receives in each cell of a step that has not run.

    A pass may run at homes in spite of a plan: `plan.in_pass("update")` is the placement that it has.

    Args:
        step: the sequences, as one trace or several of one model; or their counts, integers [M, L, G, E].
        placement: the plan of this step; or the homes of a step without replicas, integers [L, E], E / G to a rank.
        packing: of traces at homes; a plan of traces has its own.
        top_k: K, where there are counts alone. Native rows and the worst case need it.
        native_MG: integers [M, G], tokens of each source rank that no route is handed in for, such as padding that the
            dispatcher sends. Tokens of traces without a route are counted besides. Room is kept for all of them to go
            to any rank.
        align: the rows of each expert are padded to a multiple of this, such as 256 by HybridEP for FP8.

    Raises:
        CountsError: for counts, tokens or an `align` that cannot be, or that are not those of the plan.
        PlanError: when the plan was made for other tokens or has no packing, or the arguments contradict each other.
        TopologyError: for homes that are none of these counts.
    """
    align = whole_number(align, name="align", most=LARGEST_ALIGN, error=CountsError)
    plan = placement if isinstance(placement, StepPlan) else None
    traces = _as_traces(step)
    unrouted_MG: NDArray[np.int64] | None = None
    if traces is None:
        if packing is not None:
            raise PlanError("got a packing beside counts, which are packed already; leave it out, or hand in traces")
        counts_MLGE = check_counts(step, top_k=top_k)  # type: ignore[arg-type]
        if plan is not None:
            plan.require_counts(counts_MLGE)
    else:
        if top_k is not None or (packing is None) == (plan is None):
            raise PlanError(
                "traces need one packing, that of the plan or one beside homes, and have a top_k of their own; got "
                f"{'homes' if plan is None else 'a plan'}, {'no' if packing is None else 'a'} packing and top_k={top_k}"
            )
        found = None if plan is None else plan.counts_of(traces)
        packing = packing if plan is None else plan.packing
        assert packing is not None  # counts_of refuses a plan without one
        counts_MLGE = check_counts(packed_counts(traces, packing) if found is None else found)
        top_k, unrouted_MG = traces[0].spec.top_k, unrouted_tokens(traces, packing)
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    tokens_MG = _native_tokens(native_MG, (num_micro_steps, num_ranks), top_k)
    if unrouted_MG is not None:
        tokens_MG = tokens_MG + unrouted_MG
    if plan is None:
        home_LE = check_homes(placement, num_layers, num_experts, num_ranks)  # type: ignore[arg-type]
        hosts = Hosts.with_room(home_LE, num_micro_steps, num_ranks, 0)
    else:
        hosts = plan.hosts
    rows_MLG, hosted_MLG, of_replicas = _rows(hosts, counts_MLGE, align)
    # a token picks each expert once, and has one row for each pick that the rank hosts; any expert may get one
    room_MLG = tokens_MG.sum(axis=1)[:, None, None] * np.minimum(hosted_MLG, top_k or 0)
    room_MLG += (align - 1) * np.minimum(hosted_MLG, room_MLG)
    sent_MG = counts_MLGE.sum(axis=3, dtype=np.int64).max(axis=1) + tokens_MG * (top_k or 0)
    replica_rows_MLG, replicas_MLG, returned_MLG = of_replicas
    return KnownRows(rows_MLG, room_MLG, sent_MG, hosted_MLG, replica_rows_MLG, replicas_MLG, returned_MLG, top_k=top_k)


@dataclass(frozen=True, eq=False)
class KnownRows:
    """The rows of a step, by the rank that receives them.

    Attributes:
        rows_MLG: int64 [M, L, G], rows that routes name, and the padding that `align` adds to them.
        room_MLG: int64 [M, L, G], most rows that tokens without a known route can add; 0 where all routes are known.
        sent_MG: int64 [M, G], assignments that each source rank sends in a layer, those without a known route too.
        hosted_MLG: int64 [M, L, G], experts that each rank serves, replicas included.
        replica_rows_MLG: int64 [M, L, G], of `rows_MLG` those that replicas serve.
        replicas_MLG: int64 [M, L, G], of `hosted_MLG` the replicas.
        returned_MLG: int64 [M, L, G], replicas on other ranks, whose gradients return to this one.
        top_k: K; None where counts came without.
    """

    rows_MLG: NDArray[np.int64]
    room_MLG: NDArray[np.int64]
    sent_MG: NDArray[np.int64]
    hosted_MLG: NDArray[np.int64]
    replica_rows_MLG: NDArray[np.int64]
    replicas_MLG: NDArray[np.int64]
    returned_MLG: NDArray[np.int64]
    top_k: int | None

    @property
    def reserved_MLG(self) -> NDArray[np.int64]:
        """int64 [M, L, G], what to reserve: rows and room."""
        return self.rows_MLG + self.room_MLG

    @property
    def most_LG(self) -> NDArray[np.int64]:
        """int64 [L, G], what to reserve where buffers serve all micro-steps of a layer."""
        most_LG: NDArray[np.int64] = self.reserved_MLG.max(axis=0)
        return most_LG

    def require_room(self, buffers: ArrayLike) -> None:
        """Refuse, before the step, buffers that do not hold all rows: integers that broadcast to [M, L, G].

        Raises:
            PlanError: naming the cell and rank that lack most rows.
            CountsError: for buffers of another shape or type.
        """
        given, reserved_MLG = as_array(buffers, name="buffers", error=CountsError), self.reserved_MLG
        try:
            buffers_MLG = np.broadcast_to(given, reserved_MLG.shape)
        except ValueError:
            buffers_MLG = None
        if buffers_MLG is None or given.dtype.kind not in "iu":
            raise CountsError(
                f"buffers are {given.dtype} {list(given.shape)}; expected rows, integers that broadcast to "
                f"{list(reserved_MLG.shape)}"
            )
        lack_MLG = reserved_MLG - buffers_MLG.astype(np.int64)
        if lack_MLG.max() > 0:
            m, layer, g = np.unravel_index(int(lack_MLG.argmax()), lack_MLG.shape)
            room = self.room_MLG[m, layer, g]
            raise PlanError(
                f"in micro-step {m}, layer {layer}, rank {g} receives {self.rows_MLG[m, layer, g]} rows"
                f"{f' and up to {room} without a known route' if room else ''}, and {buffers_MLG[m, layer, g]} are "
                "reserved; reserve known_rows(...).most_LG, or plan to a smaller tolerance"
            )

    def megatron_arguments(self, page_size: int = 64) -> dict[str, float]:
        """Make arguments of `TransformerConfig` of Megatron-Core 0.19.2 with which no row of this step is dropped.

        `moe_expert_rank_capacity_factor` is HybridEP's, whose ranks send equally many tokens: as many as the one that
        sends most. `moe_paged_stash_buffer_size_factor_cuda` is for one micro-step at a time (no pipeline), and for
        rows, not for block scales of FP8; `page_size` is `moe_paged_stash_page_size`.
        """
        page_size = whole_number(page_size, name="page_size", most=LARGEST_ALIGN, error=CountsError)
        sent_M, reserved_MLG = self.sent_MG.max(axis=1), self.reserved_MLG
        rank_factor = _least_factor(reserved_MLG.max(axis=(1, 2)), sent_M)
        # what a layer is taken to need is its budget over the factor, cut to an integer; a page is of one layer alone
        mean_M = ((sent_M * rank_factor).astype(np.int64) // rank_factor).astype(np.int64)
        pages_MG = (-(-reserved_MLG // page_size)).sum(axis=1)
        # one buffer serves all micro-steps, and is sized by the largest
        most, mean = page_size * pages_MG.max(), reserved_MLG.shape[1] * mean_M.max()
        return {
            "moe_expert_rank_capacity_factor": rank_factor,
            "moe_paged_stash_buffer_size_factor_cuda": _least_factor(most, mean),
        }

    def torchtitan_arguments(self) -> dict[str, float]:
        """Make the argument of torchtitan 0.3.0's `HybridEPTokenDispatcher.Config` with which no row here is dropped.

        Its ranks serve their own experts alone, so that this is for a step at homes, and send equally many tokens: as
        many as the one that sends most, or more. Its `pad_multiple` is the `align` of these rows.

        Raises:
            CountsError: when `top_k` is not known.
            PlanError: for rows of a plan with replicas.
        """
        if self.top_k is None:
            raise CountsError("torchtitan's factor needs top_k, which counts do not say; pass top_k= to known_rows")
        hosted = int(self.hosted_MLG.min())
        if self.hosted_MLG.max() > hosted:
            raise PlanError("these are rows of a plan with replicas, which torchtitan has none of; pass homes")
        tokens_M = self.sent_MG.max(axis=1) // self.top_k
        worst_M = tokens_M * self.sent_MG.shape[1] * min(hosted, self.top_k)
        return {"non_blocking_capacity_factor": _least_factor(self.reserved_MLG.max(axis=(1, 2)), worst_M)}

    def policies(self, before: KnownRows | None = None) -> tuple[Reservation, ...]:
        """Compare what others would reserve for this very step, the worst case where top_k is known, and what is known.

        Buffers are cut to whole rows. `before` are the rows of the step before, whose most of a layer some reserve; its
        numbers of layers and ranks must be those of this step (`CountsError`).
        """
        rows_MLG, reserved_MLG = self.rows_MLG, self.reserved_MLG
        buffers = {f"mean x {SLACK:.2f}": (rows_MLG.mean(axis=2, keepdims=True) * SLACK).astype(np.int64)}
        if self.top_k is not None:
            # every token picks as many experts of one rank as it can
            tokens_M = self.sent_MG.sum(axis=1) // self.top_k
            buffers["worst case"] = tokens_M[:, None, None] * np.minimum(self.hosted_MLG, self.top_k)
        if before is not None:
            if before.rows_MLG.shape[1:] != rows_MLG.shape[1:]:
                raise CountsError(
                    f"the step before has {list(before.rows_MLG.shape[1:])} layers and ranks, this one "
                    f"{list(rows_MLG.shape[1:])}; expected the same"
                )
            buffers["the step before's most, of a layer"] = before.rows_MLG.max(axis=(0, 2), keepdims=True)
        buffers["known, of a layer"] = reserved_MLG.max(axis=(0, 2), keepdims=True)
        buffers["known, of a rank and layer"] = self.most_LG[None]
        buffers["known, of each cell"] = reserved_MLG
        return tuple(Reservation.of(name, buffer, rows_MLG) for name, buffer in buffers.items())


@dataclass(frozen=True)
class Reservation:
    """Buffers that a policy reserves, against the rows of a step.

    Attributes:
        name: of the policy.
        largest: rows of the largest buffer.
        overflowing_cells: share of cells with a rank whose rows do not fit.
        dropped: share of rows that do not fit.
        unused: reserved rows that stay empty, over the rows of the step.
    """

    name: str
    largest: int
    overflowing_cells: float
    dropped: float
    unused: float

    @classmethod
    def of(cls, name: str, buffers: NDArray[np.int64], rows_MLG: NDArray[np.int64]) -> Reservation:
        """Compare buffers, which broadcast to [M, L, G], with rows."""
        lack_MLG = rows_MLG - buffers
        return cls(
            name=name,
            largest=int(buffers.max()),
            overflowing_cells=float((lack_MLG > 0).any(axis=2).mean()),
            dropped=float(np.maximum(lack_MLG, 0).sum() / max(rows_MLG.sum(), 1)),
            unused=float(np.maximum(-lack_MLG, 0).sum() / max(rows_MLG.sum(), 1)),
        )


def unrouted_tokens(traces: Sequence[RoutingTrace], packing: Packing) -> NDArray[np.int64]:
    """Count the tokens of packed sequences without a route, by micro-step and source rank: int64 [M, G]."""
    return packing.sums(unrouted_of_sequences(traces))


def unrouted_of_sequences(traces: Sequence[RoutingTrace]) -> NDArray[np.int64]:
    """Count the tokens of each sequence without a route: int64 [S], 1 where only a response's last token has none."""
    routed = [np.concatenate([[0], np.cumsum(trace.valid_N)]) for trace in traces]
    return np.concatenate(
        [trace.lengths - np.diff(sums[trace.offsets]) for trace, sums in zip(traces, routed, strict=True)]
    )


def _as_traces(step: object) -> list[RoutingTrace] | None:
    """Return the traces of a step; None where it is counts."""
    if isinstance(step, RoutingTrace):
        return [step]
    if isinstance(step, Sequence) and step and all(isinstance(one, RoutingTrace) for one in step):
        return list(step)
    return None


def _native_tokens(native_MG: ArrayLike | None, shape: tuple[int, int], top_k: int | None) -> NDArray[np.int64]:
    """Return tokens without a route, int64 [M, G]; none where nobody says."""
    if native_MG is None:
        return np.zeros(shape, np.int64)
    given = as_array(native_MG, name="native_MG", error=CountsError)
    if given.shape != shape or given.dtype.kind not in "iu" or given.min() < 0 or given.max() > MOST_INT32:
        raise CountsError(
            f"native_MG is {given.dtype} {list(given.shape)}; expected tokens of each micro-step and source rank, "
            f"integers {list(shape)} from 0 to {MOST_INT32}"
        )
    if top_k is None and given.any():
        raise CountsError("native_MG needs top_k, which counts do not say; pass top_k=")
    return given.astype(np.int64)


def _rows(
    hosts: Hosts, counts_MLGE: NDArray[np.int32], align: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Count rows, and the experts that serve them, of each rank in each cell: int64 [M, L, G], twice.

    And, [3, M, L, G], of these the rows and experts that are replicas', and the replicas of each rank's experts.
    """
    num_micro_steps, num_layers, num_ranks, _ = counts_MLGE.shape
    home_MLE = counts_MLGE.sum(axis=2, dtype=np.int64)
    m_R, layer_R = np.divmod(hosts.cell_R, num_layers)
    replicas = len(m_R)
    expert_R, rank_R = hosts.expert_R[:replicas], hosts.rank_R[:replicas]
    served_R = hosts.tokens_RG[:replicas].sum(axis=1, dtype=np.int64)
    np.subtract.at(home_MLE, (m_R, layer_R, expert_R), served_R)
    rows_MLG, hosted_MLG = np.zeros((2, num_micro_steps, num_layers, num_ranks), np.int64)
    for layer, home_E in enumerate(hosts.home_LE):
        np.add.at(rows_MLG[:, layer].T, home_E, _aligned(home_MLE[:, layer].T, align))
        hosted_MLG[:, layer] = np.bincount(home_E, minlength=num_ranks)
    of_replicas = np.zeros((3, *rows_MLG.shape), np.int64)
    np.add.at(of_replicas[0], (m_R, layer_R, rank_R), _aligned(served_R, align))
    np.add.at(of_replicas[1], (m_R, layer_R, rank_R), 1)
    np.add.at(of_replicas[2], (m_R, layer_R, hosts.home_LE[layer_R, expert_R]), 1)
    return rows_MLG + of_replicas[0], hosted_MLG + of_replicas[1], of_replicas


def _aligned(rows: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Round rows of an expert up to a multiple."""
    return -(-rows // align) * align


def _least_factor(needed: ArrayLike, mean: ArrayLike) -> float:
    """Return the least factor f, to a rounding, with which int(mean * f) is at least what is needed, everywhere."""
    needed, mean = np.asarray(needed, np.int64), np.asarray(mean, np.int64)
    some = needed > 0  # an empty micro-step needs nothing, and sends nothing
    factor = float((needed[some] / mean[some]).max()) if some.any() else 1.0
    while (np.floor(mean * factor) < needed).any():  # rounding may lose a row
        factor = float(np.nextafter(factor, np.inf))
    return factor
