"""What autograd keeps of a routed layer, storage by storage, against the rows that the schedule gives a rank."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from foreroute.adapters import hf
from foreroute.ep.layer import ExpertLayer
from tests.ep import training_worker
from tests.ep.training import Case, policy
from tests.tiers import grid


@contextmanager
def counting_kept(parameters):
    """Yields how many numbers each call of a layer keeps: those of a storage once, of a parameter not at all."""
    ours, kept, call = {p.untyped_storage().data_ptr() for p in parameters}, [], ExpertLayer.__call__

    def counted(layer, *args):
        seen = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in ours:
                # the tensor too, so that no other takes its place
                seen[storage.data_ptr()] = storage.nbytes() // tensor.element_size(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = call(layer, *args)
        kept.append(sum(number for number, _ in seen.values()))
        return out

    with patch.object(ExpertLayer, "__call__", counted):
        yield kept


def kept_and_rows(rank, case):
    """By layer of the first micro-step: numbers that autograd keeps, and rows of home experts and of replicas here."""
    model = policy(case)
    routed = hf.attach(model)
    placed = hf.distribute(model, home_LE=training_worker.homes(case, routed.spec), timeout_s=20)
    rows_M = training_worker.all_rows(routed, case, rank, 0)[:1]
    counts_MLGE = routed.gather_counts(rows_M)
    plan = training_worker.make_plan(case, counts_MLGE, placed.home_LE, 0)
    with (
        routed.execute(plan, counts_MLGE, rows_M) as execution,
        routed.replay(rows_M[0]),
        counting_kept(model.parameters()) as kept,
    ):
        training_worker.log_probs(model, training_worker.batch(rank, 0, 0)).sum().backward()
    cells = [execution.served["update"].schedule.cell(0, layer) for layer in range(len(placed.layers))]
    rows = [(int(c.group_rows_S[: c.num_home].sum()), int(c.group_rows_S[c.num_home :].sum())) for c in cells]
    return kept, rows, rows_M[0].trace.num_rows * routed.spec.top_k


@pytest.mark.parametrize("plan", ["static", 1])
@grid(("family", "inner"), [("qwen3_moe", 24), ("gpt_oss", 48)], quick=1)
def test_kept_are_the_rows_that_are_computed_and_nothing_of_what_comes_back(workers, family, inner, plan):
    """A row of D, its gate weight, and of home experts 2 I before and I after the activation; routes are crowded, so
    that a rank computes other numbers of rows than it sends.
    """
    width, differing = 32, 0
    case = Case(family, 2, routing="crowded", plan=plan)
    for kept, rows, sent in workers(2).run(kept_and_rows, case):
        assert kept == [(home + replicas) * (width + 1 + 3 * inner) for home, replicas in rows]
        differing += sum(home + replicas != sent for home, replicas in rows)
    assert differing
