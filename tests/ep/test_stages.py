"""A plan that is executed in one stage, and at homes in the other: bits, what travels, and what is counted."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.errors import PlanError
from foreroute.plan.options import STAGE_NAMES
from tests.adapters.hf.model_runs import log_probs
from tests.ep.training import MICRO_STEPS, Case, batch, policy
from tests.ep.training_worker import all_rows
from tests.ep.transfer.plans import split_plan
from tests.tiers import grid

CASE = Case("qwen3_moe", 2, routing="crowded")


def counting(what, name, log):
    """Calls of a method, written down by its name."""
    method = getattr(what, name)
    return patch.object(what, name, lambda *args, **more: log.append(name) or method(*args, **more))


def run(routed, rows_M, rank, stage):
    """Log-probs, and in an update the gradients, of all micro-steps."""
    found = []
    for m, rows in enumerate(rows_M):
        with torch.set_grad_enabled(stage == "update"), routed.replay(rows):
            found.append(log_probs(routed.model, batch(rank, 0, m)))
            if stage == "update":
                found[-1].sum().backward()
    grads = [parameter.grad for parameter in routed.model.parameters() if parameter.grad is not None]
    routed.model.zero_grad(set_to_none=True)
    return [each.detach() for each in (*found, *grads)]


def two_stages(rank, paths, gains):
    """By stage: whether bits are those of no plan at all, what was called, and loads planned and executed."""
    routed = hf.attach(policy(CASE))
    placed = hf.distribute(routed.model, timeout_s=20)
    placed.use(TransferOptions(paths=paths))
    rows_M = all_rows(routed, CASE, rank, 0)
    counts_MLGE = routed.gather_counts(rows_M)
    plan = replace(split_plan(1, counts_MLGE, placed.home_LE), gains=gains)
    found = {}
    for stage in STAGE_NAMES:
        log = []
        static = run(routed, rows_M, rank, stage)
        with (
            counting(TransferEngine, "fetch", log),
            counting(TransferEngine, "send_home", log),
            counting(HostMemory, "publish", log),
            routed.execute(plan, counts_MLGE, rows_M, step=7) as execution,
        ):
            ours = run(routed, rows_M, rank, stage)
        served = plan.in_stage(stage)
        loads = [served.cell(*cell).loads_G(counts_MLGE[cell])[rank] for cell in np.ndindex(*plan.shape[:2])]
        found[stage] = {
            "same": len(ours) == len(static) and all(map(torch.equal, ours, static)),
            "called": log,
            "transfers": len(execution.transfers),
            "as served": execution.executed_ML.reshape(-1).tolist() == loads,
        }
    placed.close()
    return found


@grid(
    ("paths", "gains"),
    [
        ("host", {"recompute": 0.3, "update": 0.0099}),
        ("host", {"recompute": 0.0099, "update": 0.3}),
        ("direct", {"recompute": -1.0, "update": 0.3}),
        ("host", {"recompute": 0.0, "update": 0.0}),
    ],
    quick=2,
)
def test_a_stage_at_home_moves_nothing_and_is_static_bit_for_bit(workers, paths, gains):
    published = [stage for stage in STAGE_NAMES if gains[stage] >= 0.01][:1] if paths == "host" else []
    for of_rank in workers(2).run(two_stages, paths, gains):
        for stage, seen in of_rank.items():
            assert seen["as served"]
            assert seen["called"].count("publish") == (stage in published)
            if gains[stage] < 0.01:
                assert seen["same"]
                assert (seen["called"], seen["transfers"]) == ([], 0)
            else:
                assert "fetch" in seen["called"]
                assert ("send_home" in seen["called"]) == (stage == "update")


def other_gains(rank):
    """Ranks whose plans are decided otherwise."""
    routed = hf.attach(policy(CASE))
    placed = hf.distribute(routed.model, timeout_s=20)
    rows_M = all_rows(routed, CASE, rank, 0)[:MICRO_STEPS]
    counts_MLGE = routed.gather_counts(rows_M)
    plan = split_plan(1, counts_MLGE, placed.home_LE)
    plan = replace(plan, gains={"recompute": 0.5, "update": 0.5 * rank})
    with pytest.raises(PlanError, match="ranks hold different plans"), routed.execute(plan, counts_MLGE, rows_M):
        pass
    return True


def test_ranks_that_decide_otherwise_are_told_before_anything_moves(workers):
    assert all(workers(2).run(other_gains))


def published_under(rank, seeds):
    """By plan of one step: experts that this rank publishes, those it should, and whether losses are static ones."""
    routed = hf.attach(policy(CASE))
    placed = hf.distribute(routed.model, timeout_s=20)
    placed.use(TransferOptions())
    rows_M = all_rows(routed, CASE, rank, 0)
    counts_MLGE = routed.gather_counts(rows_M)
    static, known, found = run(routed, rows_M, rank, "update"), set(), []
    publish = HostMemory.publish
    for seed in seeds:
        plan, written = split_plan(seed, counts_MLGE, placed.home_LE, slots=1, sharing="layer"), []

        def noting(memory, homes, rows, written=written):
            mine = {layer: np.flatnonzero(home_E == rank) for layer, home_E in enumerate(placed.home_LE)}
            written += [(layer, int(mine[layer][row])) for layer, its in rows.items() for row in its]
            publish(memory, homes, rows)

        with (
            patch.object(HostMemory, "publish", noting),
            routed.execute(plan, counts_MLGE, rows_M, step=7),
        ):
            ours = run(routed, rows_M, rank, "update")
        lent = {
            (layer, int(expert))
            for m, layer in np.ndindex(*plan.shape[:2])
            for expert, at in zip(plan.cell(m, layer).expert_R, plan.cell(m, layer).rank_R, strict=True)
            if placed.home_LE[layer, expert] == rank != at
        }
        found.append((sorted(written), sorted(lent - known), all(map(torch.equal, ours[: len(rows_M)], static))))
        known |= lent
    placed.close()
    return found


def test_a_step_publishes_what_its_plans_lend_and_nothing_twice(workers):
    for of_rank in workers(2).run(published_under, (1, 2, 1)):
        for written, lent, same in of_rank:
            assert written == lent
            assert same
        assert [bool(written) for written, _, _ in of_rank] == [True, True, False]
