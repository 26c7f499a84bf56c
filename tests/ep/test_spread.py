"""What plans are executed on: models that were loaded, wrapped, attached or compiled in one way or another.

Each test stands behind the function that worker processes run for it.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.ep import execution
from tests.adapters.hf.model_runs import log_probs
from tests.ep.executor_properties import distance
from tests.ep.spread_steps import LAYERS, MICRO_STEPS, SpreadStep, compile_layers, differing
from tests.ep.test_refusals import without_route
from tests.ep.transfer.plans import split_plan, static_plan
from tests.roundings import GRADIENT_TERMS, require_rounded, roundings


def padded(rank, folder):
    """Largest output of routed experts for padding, without a plan and under one."""
    s, outputs = SpreadStep(rank, folder), []
    experts = s.model.model.layers[-1].mlp.experts
    is_padding = [~batch["attention_mask"].bool().reshape(-1) for batch in s.batches]

    def forwards():
        outputs.clear()
        hook = experts.register_forward_hook(lambda module, args, out: outputs.append(out))
        with torch.no_grad():
            for m in range(MICRO_STEPS):
                s.log_probs(m)
        hook.remove()
        return [float(out[of].abs().max()) for out, of in zip(outputs, is_padding, strict=True)]

    padding = forwards()
    with s.execute():
        return padding, forwards()


@pytest.mark.slow
def test_padding_gets_zeros_from_routed_experts_under_a_plan(workers, folder_of):
    for padding, under_plan in workers(2).run(padded, folder_of()):
        assert min(padding) > 0.01
        assert under_plan == [0.0] * MICRO_STEPS


def with_rows_that_no_plan_knows(rank, folder):
    """How often counts were exchanged, and log-probs under a plan and without, where second tokens have no route."""
    s, exchanged = SpreadStep(rank, folder, slots=0), []
    s.traces = [without_route(trace, "second") if rank else trace for trace in s.traces]
    counts_MLGE, gather = s.routed.gather_counts(s.traces), execution.gather_counts

    def forwards():
        found = []
        for trace, batch in zip(s.traces, s.batches, strict=True):
            with torch.no_grad(), s.routed.replay(trace, missing="native"):
                found.append(log_probs(s.model, batch))
        return found

    unplanned = forwards()
    with (
        patch.object(execution, "gather_counts", lambda *given: exchanged.append(1) or gather(*given)),
        pytest.warns(UserWarning, match=r"2.*2 micro-steps"),
        s.execute(static_plan(counts_MLGE), counts_MLGE),
    ):
        planned = forwards()
    return len(exchanged), unplanned, planned


def test_rows_without_a_route_that_others_depend_on_are_counted_when_they_run(workers, folder_of):
    for exchanged, unplanned, planned in workers(2).run(with_rows_that_no_plan_knows, folder_of()):
        assert exchanged == MICRO_STEPS * LAYERS
        for one, other in zip(planned, unplanned, strict=True):
            require_rounded(one, other)


def with_nothing_for_a_rank(rank, folder):
    """A step at home, and by a plan in whose first cell a rank gets no row and no replica, and the other has one."""
    s = SpreadStep(rank, folder)
    num_home = s.routed.spec.num_experts // 2
    picks_K = np.arange(s.routed.spec.top_k, dtype=np.uint8)
    # experts of rank 1 alone
    s.traces = [
        replace(each, expert_ids_NLK=num_home + (each.expert_ids_NLK[..., :1] + picks_K) % num_home)
        for each in s.traces
    ]
    s.counts_MLGE = s.routed.gather_counts(s.traces)
    plans = (split_plan(seed, s.counts_MLGE, s.routed.home_LE, slots=1) for seed in range(100))
    idle = next(plan for plan in plans if set(plan.cell(0, 0).rank_R.tolist()) == {1})
    found = []
    for plan in (None, idle):
        with s.execute(plan):
            found.append((s.update(), s.gradients()))
    return found


@pytest.mark.slow
def test_nothing_may_come_to_a_rank_while_others_have_replicas(workers, folder_of):
    for (losses, grads), (planned_losses, planned_grads) in workers(2).run(with_nothing_for_a_rank, folder_of()):
        assert planned_losses == pytest.approx(losses, rel=1e-5)
        assert distance(planned_grads, grads) < roundings(GRADIENT_TERMS, torch.float32)


def compiled_layers(rank, folder, backend, is_before):
    """Losses and gradients under two plans: as they are, compiled, and the second without a recompilation."""
    eager = SpreadStep(rank, folder)
    other, found = split_plan(6, eager.counts_MLGE, eager.routed.home_LE), []
    assert not np.array_equal(other.hosts.expert_R, eager.plan.hosts.expert_R)
    compiled = SpreadStep(rank, folder, compiled=backend) if is_before else eager
    for s in (eager, compiled):
        if s is compiled and not is_before:
            compile_layers(s.model, backend)
        for plan in (s.plan, other):
            is_known = s is compiled and plan is other
            with s.execute(plan), torch._dynamo.config.patch(error_on_recompile=is_known):
                found.append((s.update(), s.gradients()))
    return found


@pytest.mark.shows("Hugging Face", '`torch.compile` of layers, with `ep_implementation="foreroute"` under plans')
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "is_before"), [("eager", True), pytest.param("aot_eager", False, marks=pytest.mark.exhaustive)]
)
def test_compiled_layers_execute_plans_with_the_same_bits_and_no_recompilation_in_other_cells(
    workers, folder_of, backend, is_before
):
    """Before `attach` and behind it. Split sizes are numbers of the host, and others in each cell."""
    folder = folder_of(num_hidden_layers=2)
    for *eager, first, second in workers(2).run(compiled_layers, folder, backend, is_before):
        for (losses, grads), (expected, truth) in zip((first, second), eager, strict=True):
            assert losses == expected
            assert not differing(grads, truth)
