"""How often the host waits for the device in a step under a plan, on a device that stands in for a GPU and counts.

The device takes no DTensors, so experts are cut and put under transformers' implementations by hand.
"""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from foreroute.adapters import hf
from foreroute.ep import dispatch
from foreroute.replay.rows import joined_to_device
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import enable_checkpointing
from tests.ep.executor_properties import MICRO_STEPS
from tests.ep.spread_steps import drawn
from tests.ep.transfer.plans import split_plan


def spread_by_hand(rank):
    """Each rank has the half of the experts that transformers would give it, as plain tensors."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model, plan = tiny("gpt_oss", experts="grouped_mm"), {}
    for path, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            for name, each in module.named_parameters():
                setattr(module, name, nn.Parameter(each.detach().chunk(2)[rank].clone()))
            module.num_experts, module._is_expert_parallel = module.num_experts // 2, True
            plan[path] = "ep_dispatch_experts"
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
    return apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "foreroute")


def waits(rank):
    """None in a step, forward and backward, by any kind of checkpointing; and those of a control."""
    with other_device() as device, patch.object(dist, "batch_isend_irecv", post):
        routed = hf.attach(spread_by_hand(rank).to(DEVICE).train())
        for use_reentrant in (None, False, True):
            assert not waits_of_a_step(rank, routed, device, use_reentrant)
        with patch.object(dispatch, "expand_segments", waiting):
            assert waits_of_a_step(rank, routed, device, None).total() == MICRO_STEPS


def waits_of_a_step(rank, routed, device, use_reentrant):
    enable_checkpointing(routed.model, use_reentrant)
    batches, traces = drawn(routed.spec, rank)
    counts_MLGE = routed.gather_counts(traces)
    plan = split_plan(3, counts_MLGE, routed.home_LE)
    assert plan.num_replicas_ML.all()
    batches = [{name: each.to(DEVICE) for name, each in batch.items()} for batch in batches]
    found = Counter()
    with routed.execute(plan, counts_MLGE, traces):
        for batch, trace in zip(batches, traces, strict=True):
            with routed.replay(trace):
                device.reads.clear()
                logits = routed.model(**batch, use_cache=False).logits
                (logits * batch["attention_mask"][..., None]).sum().backward()
                found += device.reads  # before the session looks once, when it is left, at what routers were told
    return found


def post(operations):
    """As `dist.batch_isend_irecv`, which knows no such device."""
    ends = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [
        each.op(each.tensor.values_here, group=each.group, tag=each.tag, **{ends[each.op]: each.group_peer})
        for each in operations
    ]


def waiting(segments, sizes, device):
    """As `expand_segments`, with a size that the device has to tell."""
    start_B, length_B = joined_to_device(segments, device).unbind(1)
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    rows = shift_B.repeat_interleave(length_B)
    return (rows + torch.arange(len(rows), device=device)).split(list(sizes))


@pytest.mark.slow
def test_a_step_with_replicas_waits_for_nothing(workers):
    """Nor do padding and last tokens, which are not sent, nor recomputation."""
    workers(2).run(waits)
