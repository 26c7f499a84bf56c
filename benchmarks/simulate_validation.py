"""The simulator against the real executor: steps on 2 and 4 gloo processes, predicted with costs fitted to other steps.

On each number of processes, plans that differ in skew, tokens and replicas run in turn, round after round: the forward
passes of all micro-steps (recompute), and forward with backward under activation checkpointing (update). The time of a
plan is that of the slowest rank in the quickest round. Costs (of a FLOP, of a byte of weights and rows in memory, of a
byte between ranks, of a layer at any rate) are fitted to two thirds of the plans and predict the others, three times:
every prediction is of a plan that the fit has not seen. Ranks that share processors take turns in the model as here.
"""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.harness.spread_bench import BATCH, SIZES, SLOTS, HFBench, in_processes
from benchmarks.harness.step_prediction import PASSES, TimedStep, predict_seconds, processes_config, time_steps
from benchmarks.harness.step_seconds import recomputing_model
from foreroute.plan import PlanOptions

SKEWS = (0.0, 1.0)
SEQUENCES = (1, 2, 4, 8)
OPTIONS = {"home": PlanOptions(replicas=False), "foreroute": PlanOptions(slots="shared")}
FOLDS = 3
"""Coprime to the two ways of serving a step, so that every fold has both."""


def run(*, quick: bool) -> dict[str, Any]:
    """Errors of predictions by number of processes and pass; quick, of two processes in a single round."""
    rounds, sizes = (1, (2,)) if quick else (12, (2, 4))
    metrics = {str(num_ranks): _figures(in_processes(_timed, num_ranks, rounds), num_ranks) for num_ranks in sizes}
    return {
        "metrics": metrics,
        "baselines": {},
        "setting": {
            "rounds": rounds,
            "sizes": SIZES._asdict(),
            "load_average": [round(one, 1) for one in os.getloadavg()],
        },
    }


def _figures(timed: list[TimedStep], num_ranks: int) -> dict[str, Any]:
    config = processes_config(SIZES, num_ranks, slots=SLOTS, sequence_tokens=BATCH[1])
    figures: dict[str, Any] = {"plans": len(timed)}
    for pass_name in PASSES:
        found: list[tuple[TimedStep, float]] = []
        for fold in range(FOLDS):
            # a rate that has seen the plan would only repeat its time
            unseen = timed[fold::FOLDS]
            known = [one for n, one in enumerate(timed) if n % FOLDS != fold]
            found += zip(unseen, predict_seconds(known, unseen, pass_name, config).tolist(), strict=True)
        seconds = np.array([one.seconds[pass_name] for one, _ in found])
        predicted = np.array([value for _, value in found])
        correlation = float(spearmanr(seconds, predicted).statistic)
        figures[pass_name] = {
            "median_error": round(float(np.median(np.abs(predicted / seconds - 1))), 4),
            "worst_error": round(float(np.abs(predicted / seconds - 1).max()), 4),
            "rank_correlation": round(correlation, 4),
            "measured_and_predicted_s": {
                one.name: [round(one.seconds[pass_name], 4), round(value, 4)] for one, value in found
            },
        }
    return figures


def _timed(rank: int, num_ranks: int, rounds: int) -> list[TimedStep]:
    with closing(recomputing_model(SIZES)) as routed:
        steps = []
        for skew, sequences in itertools.product(SKEWS, SEQUENCES):
            bench = HFBench.drawn(routed.model, routed, skew=skew, shape=(sequences, BATCH[1]))
            for how, options in OPTIONS.items():
                name, plan = f"skew {skew}, {sequences} sequences, {how}", bench.plan(options)
                steps.append((TimedStep(name, bench.counts_MLGE, plan), partial(bench.seconds, plan)))
        return time_steps(steps, rounds=rounds)
