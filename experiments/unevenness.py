"""Unevenness of steps and micro-steps: loads of experts, told from the routes of the sequences of some steps.

A micro-step is `sequences` sequences on each of `num_ranks` ranks. Sequences are dealt to micro-steps

    mixed    at random
    even     at random, with as many of each kind in every micro-step
    sorted   one kind after the other

Axis letters: T steps, and those of the design: S sequences, M micro-steps, L layers, G ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute import plan
from foreroute.simulate.workload import WORKLOADS
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutingTrace

RANKS = (4, 8, 16)
BASE_RANKS = 8
"""Of what is measured for one number of ranks alone."""
SEQUENCES = (1, 2, 4, 8)
"""Of a rank in a micro-step."""
ORDERS = ("mixed", "even", "sorted")

Ints = NDArray[np.int64]
Steps = Sequence[NDArray[np.integer]]
"""counts_MLGE of steps that follow each other."""


def figures_of(traces: Sequence[RoutingTrace], kind_S: Ints, seed: int) -> dict[str, Any]:
    """Measure the traces of steps that follow each other, and what generators make in their place."""
    counts_TSLE = [sequence_counts(trace) for trace in traces]
    figures: dict[str, Any] = {
        "tokens": float(np.mean([trace.valid_N.sum() for trace in traces])),
        "kind_share": float(np.mean([kind_share(counts_SLE, kind_S) for counts_SLE in counts_TSLE])),
    }
    for order in ORDERS:
        figures[order] = {
            f"{num_ranks}x{sequences}": unevenness(dealt(counts_TSLE, kind_S, order, num_ranks, sequences, seed))
            for num_ranks in RANKS
            for sequences in SEQUENCES
        }
    rng = np.random.default_rng([seed, 1])
    figures["shuffled"] = {
        f"{BASE_RANKS}x{sequences}": unevenness(
            [shuffled(trace, len(kind_S) // (BASE_RANKS * sequences), rng) for trace in traces]
        )
        for sequences in SEQUENCES
    }
    for name, generated in (("workload", drawn), ("calibrated", recalibrated), ("synthetic", made_up)):
        figures[name] = {
            f"{BASE_RANKS}x{sequences}": unevenness(generated(traces, sequences, seed)) for sequences in SEQUENCES
        }
    return figures


def sequence_counts(trace: RoutingTrace) -> Ints:
    """int64 [S, L, E], assignments of each sequence."""
    return plan.sequence_counts(trace).astype(np.int64)


def dealt(
    counts_TSLE: Sequence[Ints], kind_S: Ints, order: str, num_ranks: int, sequences: int, seed: int
) -> list[Ints]:
    """counts_MLGE of each step, its sequences dealt in one of `ORDERS`; those that fill no micro-step are left out."""
    rng = np.random.default_rng([seed, 0])
    steps = []
    for counts_SLE in counts_TSLE:
        order_S = rng.permutation(len(kind_S))
        if order != "mixed":
            order_S = order_S[np.argsort(kind_S[order_S], kind="stable")]
        if order == "even":
            order_S = order_S.reshape(len(np.unique(kind_S)), -1).T.reshape(-1)
        # a micro-step that is not full would be uneven by its size alone
        used = len(order_S) // (num_ranks * sequences) * num_ranks * sequences
        counts = counts_SLE[order_S[:used]].reshape(-1, sequences, num_ranks, *counts_SLE.shape[1:])
        steps.append(counts.sum(axis=1).swapaxes(1, 2))
    return steps


def shuffled(trace: RoutingTrace, num_micro_steps: int, rng: np.random.Generator) -> Ints:
    """counts_MLGE of micro-steps of tokens drawn at random from the step, whatever their sequences; one rank."""
    ids_NLK = rng.permutation(trace.expert_ids_NLK[trace.valid_N])
    spec = trace.spec
    counts = np.zeros((num_micro_steps, spec.num_layers, 1, spec.num_experts), np.int64)
    for m, part_NLK in enumerate(np.array_split(ids_NLK, num_micro_steps)):
        for layer in range(spec.num_layers):
            counts[m, layer, 0] = np.bincount(part_NLK[:, layer].reshape(-1), minlength=spec.num_experts)
    return counts


def drawn(
    traces: Sequence[RoutingTrace], sequences: int, seed: int, preset: str = f"G{BASE_RANKS}"
) -> list[NDArray[np.int32]]:
    """counts_MLGE of steps that `simulate.workload` draws in their place, as uneven as a preset for 8 ranks."""
    spec, lengths = traces[0].spec, np.concatenate([trace.lengths for trace in traces])
    workload = replace(
        WORKLOADS[preset],
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_layers=spec.num_layers,
        num_micro_steps=len(traces[0]) // (BASE_RANKS * sequences),
        sequences_per_rank=(sequences, sequences),
        mean_length=int(lengths.mean()),
        longest=int(lengths.max()),
    )
    return [workload.draw(seed=seed, step=step).counts() for step in range(len(traces))]


def recalibrated(traces: Sequence[RoutingTrace], sequences: int, seed: int) -> list[NDArray[np.int32]]:
    """Draw likewise, as uneven as the preset that was calibrated to these traces."""
    return drawn(traces, sequences, seed, f"R{BASE_RANKS}")


def made_up(traces: Sequence[RoutingTrace], sequences: int, seed: int) -> list[Ints]:
    """counts_MLGE of steps of `synthetic_trace`, of the same lengths; one trace, so that popularity lasts."""
    lengths = np.concatenate([trace.lengths for trace in traces])
    counts = sequence_counts(synthetic_trace(traces[0].spec, lengths.tolist(), seed=seed))
    steps = np.split(counts, len(traces))
    kind_S: Ints = np.zeros(len(traces[0]), np.int64)
    return dealt(steps, kind_S, "mixed", BASE_RANKS, sequences, seed)


def unevenness(steps: Steps) -> dict[str, float]:
    """Figures of steps, averaged over layers, and over neighbouring steps or over micro-steps.

    step_correlation: of the experts' loads with those of the step before.
    step_change: share of assignments that go to another expert than they would by the shares of the step before.
    step_imbalance: slowest rank over the mean, of whole steps with contiguous homes on `BASE_RANKS` ranks.
    micro_correlation: of the experts' loads with those of the micro-step before; left out where a step has one.
    swing: share of assignments of a micro-step that go to another expert than they would by the shares of its step.
    variance: mean square of the same differences between shares, over the square of the mean share 1 / E.
    imbalance: slowest rank over the mean, of micro-steps with contiguous homes.
    """
    totals = [counts.sum(axis=(0, 2)) for counts in steps]
    micro = [counts.sum(axis=2) for counts in steps]
    differences = [_shares(part) - _shares(total) for part, total in zip(micro, totals, strict=True)]
    changes = [_shares(now) - _shares(before) for before, now in pairwise(totals)]
    followed = [pair for part in micro for pair in pairwise(part)]
    num_ranks, num_experts = steps[0].shape[2:]
    figures = {
        "step_correlation": np.mean([_correlation(*pair) for pair in pairwise(totals)]),
        "step_change": np.mean([np.abs(change).sum(axis=-1) for change in changes]) / 2,
        "step_imbalance": contiguous_imbalance(np.stack(totals), BASE_RANKS),
        "swing": np.mean([np.abs(part).sum(axis=-1) for part in differences]) / 2,
        "variance": np.mean([(part**2).mean() for part in differences]) * num_experts**2,
        "imbalance": contiguous_imbalance(np.concatenate(micro), num_ranks),
    }
    if followed:
        figures["micro_correlation"] = np.mean([_correlation(*pair) for pair in followed])
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def contiguous_imbalance(counts_MLE: Ints, num_ranks: int) -> float:
    """Mean over (micro-step, layer) cells of the slowest rank's load over the mean load, with contiguous homes."""
    loads_CG = counts_MLE.reshape(-1, num_ranks, counts_MLE.shape[-1] // num_ranks).sum(axis=-1)
    # an empty cell is no barrier
    loads_CG = loads_CG[loads_CG.sum(axis=1) > 0]
    return float((loads_CG.max(axis=1) / loads_CG.mean(axis=1)).mean()) if len(loads_CG) else 1.0


def kind_share(counts_SLE: Ints, kind_S: Ints) -> float:
    """Part of the variance of expert shares between sequences that their kinds explain, averaged over layers."""
    shares_SLE = _shares(counts_SLE)
    mean_LE = shares_SLE.mean(axis=0)
    whole_L = ((shares_SLE - mean_LE) ** 2).sum(axis=(0, 2))
    between_L = np.zeros_like(whole_L)
    for kind in np.unique(kind_S):
        own = shares_SLE[kind_S == kind]
        between_L += len(own) * ((own.mean(axis=0) - mean_LE) ** 2).sum(axis=1)
    return float((between_L / whole_L).mean())


def kind_information(counts_SLE: Ints, kind_S: Ints) -> float:
    """Bits that the expert of an assignment says about the kind of its text, all kinds alike; mean over layers."""
    # 0 where all kinds go to the same experts, log2 of the number of kinds where they share none
    shares_DLE = np.stack([_shares(counts_SLE[kind_S == kind].sum(axis=0)) for kind in np.unique(kind_S)])
    mean_LE = shares_DLE.mean(axis=0)
    ratio_DLE = np.divide(shares_DLE, mean_LE, out=np.ones_like(shares_DLE), where=shares_DLE > 0)
    return float((shares_DLE * np.log2(ratio_DLE)).sum(axis=2).mean())


def _shares(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Divide by the sum over experts, the last axis."""
    shares: NDArray[np.float64] = counts / counts.sum(axis=-1, keepdims=True)
    return shares


def _correlation(first_LE: NDArray[np.integer], second_LE: NDArray[np.integer]) -> float:
    pairs = zip(first_LE, second_LE, strict=True)
    return float(np.mean([np.corrcoef(one_E, other_E)[0, 1] for one_E, other_E in pairs]))
