"""What plans are executed on: rows that they do not know, counts of all ranks, and layers that were compiled."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.ep import execution
from tests.adapters.hf.model_runs import log_probs
from tests.ep.executor_properties import LAYERS, MICRO_STEPS
from tests.ep.spread_steps import SpreadStep, differing
from tests.ep.transfer.plans import split_plan, static_plan
from tests.roundings import require_rounded


def without_second_routes(trace):
    """Those of the second token of each sequence, on which others depend."""
    valid_N = trace.valid_N.copy()
    valid_N[trace.offsets[:-1] + 1] = False
    return replace(trace, valid_N=valid_N)


def with_rows_that_no_plan_knows(rank, folder):
    s, exchanged = SpreadStep(rank, folder, slots=0), []
    s.traces = [without_second_routes(trace) if rank else trace for trace in s.traces]
    counts_MLGE, gather = s.routed.gather_counts(s.traces), execution.gather_counts

    def forwards():
        found = []
        for trace, batch in zip(s.traces, s.batches, strict=True):
            with torch.no_grad(), s.routed.replay(trace, missing="native"):
                found.append(log_probs(s.model, batch))
        return torch.cat(found)

    unplanned = forwards()
    with (
        patch.object(execution, "gather_counts", lambda *given: exchanged.append(1) or gather(*given)),
        pytest.warns(UserWarning, match=r"2.*2 micro-steps"),
        s.execute(static_plan(counts_MLGE), counts_MLGE),
    ):
        require_rounded(forwards(), unplanned)
    assert len(exchanged) == MICRO_STEPS * LAYERS


def test_rows_without_a_route_that_others_depend_on_are_counted_when_they_run(workers, folder_of):
    workers(2).run(with_rows_that_no_plan_knows, folder_of())


def gathered(rank, folder):
    """Counts of all ranks, and the traces, none in the last micro-step."""
    s = SpreadStep(rank, folder, slots=0)
    traces = [without_second_routes(trace) for trace in s.traces]
    if rank:
        traces[1] = traces[1].select([])
    found = s.routed.gather_counts(traces)
    assert np.array_equal(found, s.routed.gather_counts([s.routed.rows(trace) for trace in traces]))
    mine_ML = np.arange(6).reshape(3, 2)
    executions = [SimpleNamespace(executed_ML=each + 10 * rank) for each in (mine_ML[:1], mine_ML[1:])]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as call:
        executed_MLG = s.routed.spread.gather_executed(executions)
    assert call.call_args.kwargs["group"] is not s.routed.spread._group, "which may be NCCL's, of no host tensors"
    assert np.array_equal(executed_MLG, mine_ML[..., None] + [0, 10])
    return found, [(trace.expert_ids_NLK, trace.valid_N) for trace in traces]


def test_every_rank_gets_the_counts_of_all(workers, folder_of):
    (found_MLGE, first), (other_MLGE, second) = workers(2).run(gathered, folder_of())
    np.testing.assert_array_equal(found_MLGE, other_MLGE)
    for m, layer, g, expert in np.ndindex(found_MLGE.shape):
        ids_NLK, valid_N = (first, second)[g][m]
        assert found_MLGE[m, layer, g, expert] == (ids_NLK[valid_N, layer] == expert).sum()
    assert found_MLGE[0, :, 0].sum()
    assert not found_MLGE[1, :, 1].sum()


def compiled_layers(rank, folder):
    """Losses and gradients under two plans are equal; the second brings no recompilation."""
    eager, compiled = (SpreadStep(rank, folder, compiled=how) for how in ("", "eager"))
    other = split_plan(6, eager.counts_MLGE, eager.routed.home_LE)
    assert not np.array_equal(other.hosts.expert_R, eager.plan.hosts.expert_R)
    for plan in (eager.plan, other):
        with eager.execute(plan):
            losses, grads = eager.update(), eager.gradients()
        with compiled.execute(plan), torch._dynamo.config.patch(error_on_recompile=plan is other):
            assert compiled.update() == losses
        assert not differing(compiled.gradients(), grads)


@pytest.mark.shows("Hugging Face", '`torch.compile` of layers, with `ep_implementation="foreroute"` under plans')
@pytest.mark.slow
def test_compiled_layers_execute_plans_with_the_same_bits_and_no_recompilation_in_other_cells(workers, folder_of):
    """Split sizes are numbers of the host, and others in each cell."""
    workers(2).run(compiled_layers, folder_of(num_hidden_layers=2))
