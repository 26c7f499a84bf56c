"""What plans are executed on: models that were loaded, wrapped, attached or compiled in one way or another.

Each test stands behind the function that worker processes run for it.
"""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.ep import execution
from tests.adapters.hf.model_runs import log_probs
from tests.ep.spread_steps import LAYERS, MICRO_STEPS, SpreadStep, differing
from tests.ep.test_refusals import without_route
from tests.ep.transfer.plans import split_plan, static_plan
from tests.roundings import require_rounded


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


def compiled_layers(rank, folder):
    """Losses and gradients under two plans: as they are, compiled, and the second without a recompilation."""
    eager = SpreadStep(rank, folder)
    other, found = split_plan(6, eager.counts_MLGE, eager.routed.home_LE), []
    assert not np.array_equal(other.hosts.expert_R, eager.plan.hosts.expert_R)
    compiled = SpreadStep(rank, folder, compiled="eager")
    for s in (eager, compiled):
        for plan in (s.plan, other):
            is_known = s is compiled and plan is other
            with s.execute(plan), torch._dynamo.config.patch(error_on_recompile=is_known):
                found.append((s.update(), s.gradients()))
    return found


@pytest.mark.shows("Hugging Face", '`torch.compile` of layers, with `ep_implementation="foreroute"` under plans')
@pytest.mark.slow
def test_compiled_layers_execute_plans_with_the_same_bits_and_no_recompilation_in_other_cells(workers, folder_of):
    """Split sizes are numbers of the host, and others in each cell."""
    folder = folder_of(num_hidden_layers=2)
    for *eager, first, second in workers(2).run(compiled_layers, folder):
        for (losses, grads), (expected, truth) in zip((first, second), eager, strict=True):
            assert losses == expected
            assert not differing(grads, truth)
