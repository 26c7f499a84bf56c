"""Packing by routes: what the slowest ranks at fixed homes have over the bound, and what it takes.

`recorded` are routes that the model of `experiments`, part H, really made, which `python -m experiments run --only
H/routes/0 --results runs/routes.jsonl` keeps, in five minutes of a core. Without them, and with `--quick`, they are
left out. The other steps are drawn. A case has G ranks and about n sequences of a rank in a
micro-step, at blocks of experts.

Counted: assignments, attention by the packer's price, weights that a plan fetches. Measured: seconds of a processor.
Modelled: the passes of a plan over those of a plan of the packing by length, with 64 times the counts of the recorded
sequences, which are of about 100 tokens.

`homes_imbalance` is the slowest ranks over the mean, all cells together, without a replica, when experts moved before
the last step and sequences are packed for them; `old_homes_imbalance` where homes are those of the step before, and
nothing moves; `old_homes_median` of all steps that have one before.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import step_parts
from foreroute.layout import Packing, exchange_sequences, pack_sequences
from foreroute.plan import PlanOptions, StepPlan, sequence_counts
from foreroute.planner import plan
from foreroute.planner.packed_homes import PackedSequences
from foreroute.simulate.workload import WORKLOADS
from foreroute.trace import load

Ints = NDArray[np.int64]
STARTS = Path("runs/starts")
"""Where experiments keep what they made."""
SQUARE = 8192 / 37.7e6
"""Attention of a pair of tokens over the projections of one, Qwen3-30B-A3B by FLOPs."""
ROOM = 1.08
"""The token budget over the mean of a rank in a micro-step, unless one sequence is longer."""
OPTIONS = PlanOptions(traffic=False, pay_off=False)
TIMES = 64
"""What counts of recorded sequences are multiplied with, where passes are modelled."""
RECORDED = ((8, 1), (8, 4), (16, 1))
"""Ranks, and sequences of a rank in a micro-step."""
DRAWN: tuple[tuple[str, int, int, int, int], ...] = (
    ("R8", 1, 32, 8, 1),
    ("R8", 4, 32, 8, 1),
    ("G8", 4, 32, 8, 1),
    ("G8", 4, 8, 8, 4),
    ("G16", 4, 16, 8, 1),
    ("G64", 4, 4, 48, 1),  # 1,024 sequences x 48 layers x 64 ranks
)
"""Preset, sequences of a rank in a micro-step, micro-steps of a group, layers, groups."""


def run(*, quick: bool) -> dict[str, Any]:
    """Give the figures of every case."""
    cases = {}
    for preset, sequences, micro_steps, layers, groups in DRAWN:
        base = WORKLOADS[preset]
        workload = replace(
            replace(base, mean_length=6000) if sequences == 1 else base,
            num_micro_steps=micro_steps * groups,
            num_layers=layers,
            sequences_per_rank=(sequences, sequences),
        )
        step = workload.draw(seed=0)
        name = f"{preset.lower()}_n{sequences}" + f"_groups{groups}" * (groups > 1)
        rows_S = step.rows_S.astype(np.int64)
        cases[name] = _case(step.sequence_counts(), rows_S, workload.num_ranks, micro_steps, groups)[0]
    if not quick and (found := _recorded()) is not None:
        counts_SLE, rows_S = found[-1]
        for ranks, sequences in RECORDED:
            micro_steps = len(rows_S) // (ranks * sequences)
            figures, packings = _case(counts_SLE, rows_S, ranks, micro_steps, 1)
            figures |= _planned(counts_SLE, packings) | _at_homes(found, ranks, micro_steps)
            cases[f"recorded_g{ranks}_n{sequences}"] = figures
    return {"metrics": {"packing": cases}}


def _recorded() -> list[tuple[Ints, Ints]] | None:
    """Read counts and routed rows of the sequences of every step, if a run of `experiments` kept them."""
    for folder in sorted(STARTS.glob("routes-*")):
        found = []
        for path in sorted(folder.glob("step-*.safetensors")):
            trace = load(path)
            counts_SLE = sequence_counts(trace).astype(np.int64)
            found.append((counts_SLE, counts_SLE[:, 0].sum(axis=1) // trace.spec.top_k))
        return found if len(found) > 1 else None
    return None


def _case(
    counts_SLE: NDArray[Any], rows_S: Ints, ranks: int, micro_steps: int, groups: int
) -> tuple[dict[str, float], tuple[Packing, Packing]]:
    """Pack by length and by routes."""
    budget = _budget(rows_S, ranks * groups * micro_steps)
    begin = time.process_time()
    by_length = pack_sequences(rows_S, ranks * groups, budget, square_cost=SQUARE)
    middle = time.process_time()
    packed = pack_sequences(rows_S, ranks * groups, budget, square_cost=SQUARE, counts=counts_SLE, groups=groups)
    end, found = time.process_time(), packed.certificate
    assert found is not None
    mean = float(counts_SLE.sum(dtype=np.int64)) / (ranks * groups)
    figures = {
        "over_bound": found.over_bound,
        "by_length_over_bound": found.by_length / found.bound,
        "bound_over_mean": found.bound / mean,
        "attention_over_by_length": found.attention,
        "sequences": len(rows_S),
        "micro_steps": packed.num_micro_steps,
        "processor_s": end - middle,
        **_on_own_rank(by_length, rows_S, counts_SLE, budget, groups),
        "by_length_processor_s": middle - begin,
    }
    return figures, (by_length, packed)


def _on_own_rank(
    by_length: Packing, rows_S: Ints, counts_SLE: NDArray[Any], budget: int, groups: int
) -> dict[str, float]:
    """Exchange sequences on the rank that has them by length, as a trainer does."""
    if groups > 1:  # each of them for itself
        return {}
    begin = time.process_time()
    found = exchange_sequences(by_length, rows_S, counts_SLE, token_budget=budget, square_cost=SQUARE).certificate
    assert found is not None
    return {"on_own_rank_over_bound": found.over_bound, "on_own_rank_processor_s": time.process_time() - begin}


def _budget(rows_S: Ints, places: int) -> int:
    return int(max(rows_S.max(), ROOM * rows_S.sum() / places))


def _at_homes(steps: list[tuple[Ints, Ints]], ranks: int, micro_steps: int) -> dict[str, float]:
    """Place experts for each step, from blocks, and pack it for these homes and for those of the step before."""
    topology, given = HARDWARE["h100"].topology(ranks, 0), []
    blocks_LE = topology.contiguous_home_LE(*steps[0][0].shape[1:])
    for counts_SLE, rows_S in steps:
        budget = _budget(rows_S, ranks * micro_steps)
        packing = pack_sequences(rows_S, ranks, budget, square_cost=SQUARE)
        given.append(
            PackedSequences(
                packing=packing, lengths_S=rows_S, counts_SLE=counts_SLE, token_budget=budget, square_cost=SQUARE
            )
        )
    begin = time.process_time()
    found = [step.with_homes(topology, blocks_LE) for step in given]
    seconds = (time.process_time() - begin) / len(given)
    aged = [step.packed_for(home_LE) for step, (_, home_LE) in zip(given[1:], found, strict=False)]
    old = [_imbalance(each) for each in aged]
    return {
        "homes_imbalance": _imbalance(found[-1][0]),
        "homes_processor_s": seconds,
        "old_homes_imbalance": old[-1],
        "old_homes_median": statistics.median(old),
    }


def _imbalance(packed: PackedSequences) -> float:
    assert packed.packing.certificate is not None, "it was packed by routes"
    return packed.packing.certificate.slowest * packed.packing.num_ranks / float(packed.counts_SLE.sum())


def _planned(counts_SLE: Ints, packings: tuple[Packing, Packing]) -> dict[str, float]:
    """Plan both packings from blocks of experts, and compare what they fetch and what they take."""
    model = replace(MODELS["qwen3-30b-a3b"], num_experts=counts_SLE.shape[2], top_k=8)
    costs, found = CostModel(model=model, hardware=HARDWARE["h100"], dispatcher="copies"), []
    for packing in packings:
        topology = HARDWARE["h100"].topology(packing.num_ranks, 2)
        shape = (packing.num_micro_steps, packing.num_ranks, *counts_SLE.shape[1:])
        counts_MGLE = np.zeros(shape, np.int64)
        np.add.at(counts_MGLE, (packing.micro_step_S, packing.rank_S), counts_SLE * TIMES)
        counts_MLGE = np.ascontiguousarray(counts_MGLE.swapaxes(1, 2))
        made: StepPlan = plan(counts_MLGE, topology, OPTIONS)
        seconds = step_parts(made.hosts, counts_MLGE.astype(np.int32), topology, costs).sum(axis=1)
        found.append((int(made.hosts.fetched_R.sum()), *seconds.tolist()))
    fetched, recompute, update = (routes / length for length, routes in zip(*found, strict=True))
    return {"plan_fetches": fetched, "plan_recompute_modelled": recompute, "plan_update_modelled": update}
