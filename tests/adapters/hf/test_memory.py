"""Memory of a spread model: forecasts of micro-batches that were not measured, and models that are refused."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from foreroute import RoutingTrace, planner
from foreroute.adapters import hf
from foreroute.adapters.hf.loading import spread
from foreroute.adapters.hf.memory import draw_micro_batches, measure_memory
from foreroute.adapters.hf.response_logprobs import pad
from foreroute.costs.memory import BatchSizes
from foreroute.ep.allocations import AllocationLog
from foreroute.errors import ForecastError
from foreroute.plan import Links, PlanOptions, Topology, known_rows
from foreroute.testing.models import tiny

VOCABULARY = 64


def routed_of(experts="grouped_mm"):
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "moe_intermediate_size": 192}
    model = tiny("qwen3_moe", experts=experts, **sizes)
    return hf.attach(spread(model, torch.device("cpu")).train())


def measured(routed, traces):
    targets_M = [len(trace) * int(trace.lengths.max()) for trace in traces]
    return measure_memory(routed, traces, targets_M, lambda number: loss_of(routed.model, traces[number]))


def loss_of(model, trace):
    ids, mask = map(torch.from_numpy, pad(trace))
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().logsumexp(-1).sum()


def forecast_and_logged(rank, num_ranks):
    """By way: bytes forecast, without slots too, and those that a log of the whole micro-step has seen."""
    routed = routed_of()
    drawn = draw_micro_batches(routed.spec, VOCABULARY)
    memory = measured(routed, drawn)
    # others, of sequences four times as long
    wholes = draw_micro_batches(routed.spec, VOCABULARY, seed=1)[:12]
    traces = [longer(*wholes[i : i + 4]) for i in (0, 4, 8)]
    rows_M = [routed.rows(trace) for trace in traces]
    counts = routed.gather_counts(rows_M)
    own = [[len(t) * w, len(t) * w * w, len(t) * w] for t in traces for w in [int(t.lengths.max())]]
    parts = [None] * num_ranks
    dist.all_gather_object(parts, own)
    sizes, found = BatchSizes(*np.array(parts).transpose(2, 1, 0)), {}
    topology = Topology(num_ranks, num_ranks, 2, Links(1e9, 1e9, 1e9, 1e-5, 1e-5))
    for plan in (None, planner.plan(counts, topology, PlanOptions(), home_LE=routed.home_LE)):
        known = known_rows(counts, routed.home_LE if plan is None else plan, top_k=routed.spec.top_k)
        for _ in range(2):  # the first makes gradients
            logged, log = [], AllocationLog(torch.device("cpu"))
            with routed.execute(plan, counts, rows_M), log.open():
                for trace, rows in zip(traces, rows_M, strict=True):
                    log.begin("whole")
                    with routed.replay(rows):
                        loss_of(routed.model, trace).backward()
                    logged.append(max(log.sections[-1].after))
        ours = [memory.forecast(known, sizes, each).bytes_MG[:, rank] for each in (plan, None)]
        found["homes" if plan is None else "plans"] = np.array([*ours, logged])
    with pytest.raises(ForecastError, match="gradients"):
        measured(routed, drawn)
    routed.model.zero_grad(set_to_none=True)
    replicas = int(known.replicas_MLG.sum())
    # one try in place of four, and fewer micro-batches: such experts follow something else every time
    with mock.patch.object(hf.memory, "TRIES", 1), pytest.raises(ForecastError, match="grouped_mm"):
        measured(routed_of("eager"), drawn[:21])
    return found, replicas


def longer(first, *others):
    tokens, ids = zip(*((each.token_ids_N, each.expert_ids_NLK) for each in (first, *others)), strict=True)
    return RoutingTrace.from_sequences(first.spec, [np.concatenate(tokens), tokens[0]], [np.concatenate(ids), ids[0]])


# tests/costs has the formula, and benchmarks/rows.py peaks that torch does not count
@pytest.mark.slow
def test_larger_micro_batches_take_what_small_ones_tell(workers):
    for found, replicas in workers(2).run(forecast_and_logged, 2):
        assert replicas > 0
        for ours, _, logged in found.values():
            np.testing.assert_allclose(ours, logged, rtol=0.02)
        _, without_slots, logged = found["plans"]
        assert np.abs(without_slots / logged - 1).max() > 0.025, "what leaves the slots out misses"


def test_a_log_has_the_bytes_of_its_device_alone():
    """Views and what is there already take none; neither do tensors of other devices, nor those that have no memory."""
    log, (before, shapes) = AllocationLog(torch.device("cpu")), (torch.ones(3), FakeTensorMode())
    fake = shapes.from_tensor(before)
    with log.open():
        log.begin("part", 1)
        kept = torch.ones(4)
        others = kept.view(2, 2), before.add_(1), torch.ones(8, device="meta"), fake + 1, torch.ones(2)
        del others
        log.begin("next")
        kept.untyped_storage().resize_(0)
    assert log.sections == [(("part", 1), 0, [16, 24]), (("next", None), 16, [0])]
