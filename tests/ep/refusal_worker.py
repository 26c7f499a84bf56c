"""What worker processes do that must end in an error on all of them."""

import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.plan.counts import counts_digest
from foreroute.testing.models import tiny
from tests.adapters.hf.families import build
from tests.ep.planned import split_plan, static_plan
from tests.ep.training import Case, batch, policy, replaying
from tests.ep.training_worker import all_counts, rows_of
from tests.ep.transfer.plans import random_plan

CASE = Case(ranks=2, plan=0)


def executions(rank):
    """Run every case, and after each of them the right one, on the same model; by name, how both ended."""
    model = policy(CASE)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    counts_MLGE = all_counts(routed, CASE, rank, 0)
    plan = split_plan(5, counts_MLGE, placed.home_LE)
    situation = Situation(placed, routed, plan, counts_MLGE, rank)
    return {name: (execution(situation, name), execution(situation, "right")) for name in CASES}


def execution(situation, name):
    """The error of the case of that name, and how many all-to-alls there were before it ended."""
    with counting_all_to_alls() as calls:
        try:
            CASES[name](situation)
        except Exception as error:
            return type(error).__name__, str(error), len(calls)
    return "nothing", "", len(calls)


class Situation:
    """What a case needs."""

    def __init__(self, placed, routed, plan, counts_MLGE, rank):
        self.placed, self.routed, self.plan, self.counts_MLGE, self.rank = placed, routed, plan, counts_MLGE, rank

    def begin(self, plan=None, counts_MLGE="planned"):
        counts_MLGE = self.counts_MLGE if isinstance(counts_MLGE, str) else counts_MLGE
        self.placed.begin_step(0, plan or self.plan, counts_MLGE)

    def forward(self, micro_step=0, *, rows=None, replay=True, of=None):
        of = micro_step if of is None else of
        rows = rows or rows_of(self.routed, CASE, self.rank, 0, of)
        session = replaying(self.routed, CASE, self.rank, 0, of) if replay else nullcontext()
        with session, self.placed.executing(micro_step, rows):
            self.placed.model(**batch(self.rank, 0, of), use_cache=False)


@contextmanager
def counting_all_to_alls():
    calls, original = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        yield calls
    finally:
        dist.all_to_all_single = original


def right(s):
    s.begin()
    s.forward(1)


def other_world_size(s):
    plan = random_plan(0, ranks=4, slots=0, shuffled=False)
    s.begin(plan, None)


def plans_differ(s):
    s.begin(split_plan(5 + s.rank, s.counts_MLGE, s.placed.home_LE))


def no_plan_on_one_rank(s):
    s.placed.begin_step(0, None if s.rank else s.plan, s.counts_MLGE)


def a_number_for_a_plan_on_one_rank(s):
    s.placed.begin_step(0, 5 if s.rank else s.plan, s.counts_MLGE)


def a_number_for_traces_on_one_rank(s):
    s.placed.begin_step(0, s.plan, 5 if s.rank else s.counts_MLGE)


def other_homes(s):
    home_LE = np.roll(s.placed.home_LE, 1, axis=1)
    s.begin(static_plan(s.counts_MLGE, home_LE))


def other_layers(s):
    s.begin(static_plan(s.counts_MLGE[:, :2]), s.counts_MLGE[:, :2])


def other_counts_on_one_rank(s):
    s.begin(counts_MLGE=s.counts_MLGE + s.rank)


def counts_of_another_shape(s):
    s.begin(counts_MLGE=s.counts_MLGE[:1])


def gathered_of_other_micro_steps(s):
    s.placed.gather_counts(s.counts_MLGE[: 1 + s.rank, :, s.rank])


def gathered_of_other_experts(s):
    s.placed.gather_counts(s.counts_MLGE[:, :, s.rank, :4])


def gathered_of_shares(s):
    s.placed.gather_counts(s.counts_MLGE[:, :, s.rank] / 2)


def no_plan(s):
    s.placed.use(s.placed._weights)
    s.forward()


def another_micro_batch_on_one_rank(s):
    s.begin()
    s.forward(0, of=s.rank)


def other_micro_steps(s):
    s.begin()
    s.forward(s.rank)


def no_such_micro_step(s):
    s.begin()
    s.forward(2, of=0)


def live_routes_of_other_counts(s):
    s.begin()
    s.forward(rows=live_rows(s), replay=False)


def live_routes_of_other_counts_with_the_plan_alone(s):
    s.begin(counts_MLGE=None)
    s.forward(rows=live_rows(s), replay=False)


def live_rows(s):
    real_N = batch(s.rank, 0, 0)["attention_mask"].bool().flatten().numpy()
    return BatchRows(planned_N=real_N, sent_N=real_N)


def routers_free_though_routes_were_announced(s):
    s.begin()
    s.forward(replay=False)
    s.placed.sum_gradients()


def and_another_micro_step_begins(s):
    s.begin()
    s.forward(replay=False)
    with s.placed.executing(1, rows_of(s.routed, CASE, s.rank, 0, 1)):
        pass


def and_another_step_begins(s):
    s.begin()
    s.forward(replay=False)
    s.begin()


def more_to_replicas_than_there_is(s):
    counts_MLGE = np.maximum(s.counts_MLGE - 1, 0)
    plan = replace(s.plan, counts_digest=counts_digest(counts_MLGE))
    s.begin(plan, counts_MLGE)
    rows = rows_of(s.routed, CASE, s.rank, 0, 0)
    s.forward(rows=replace(rows, routed_LE=counts_MLGE[0, :, s.rank]))


def no_forward(s):
    s.begin()
    with s.placed.executing(0):
        pass


def two_forwards(s):
    s.begin()
    with replaying(s.routed, CASE, s.rank, 0, 0), s.placed.executing(0, rows_of(s.routed, CASE, s.rank, 0, 0)):
        for _ in range(2):
            s.placed.model(**batch(s.rank, 0, 0), use_cache=False)


def rows_of_another_batch(s):
    s.begin()
    rows = rows_of(s.routed, CASE, s.rank, 0, 0)
    longer = replace(rows, planned_N=np.append(rows.planned_N, False), sent_N=np.append(rows.sent_N, False))
    s.forward(rows=longer)


def checkpointed_by_hand(s, use_reentrant=False):
    s.begin(counts_MLGE=None)
    embeds = s.placed.model.get_input_embeddings()(batch(s.rank, 0, 0)["input_ids"]).detach().requires_grad_()
    with s.placed.executing(0):
        checkpoint(lambda x: s.placed.model(inputs_embeds=x).logits, embeds, use_reentrant=use_reentrant)


def checkpointed_by_hand_reentrant(s):
    checkpointed_by_hand(s, use_reentrant=True)


def state_of_a_shard(s):
    s.placed.model.state_dict()


def state_into_a_shard(s):
    s.placed.model.load_state_dict(s.placed.state_dict())


def state_of_one_rank(s):
    state = s.placed.state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    s.placed.load_state_dict({**state, name: state[name][:4]})


CASES = {
    function.__name__: function
    for function in (
        right,
        other_world_size,
        plans_differ,
        no_plan_on_one_rank,
        a_number_for_a_plan_on_one_rank,
        a_number_for_traces_on_one_rank,
        other_homes,
        other_layers,
        other_counts_on_one_rank,
        counts_of_another_shape,
        gathered_of_other_micro_steps,
        gathered_of_other_experts,
        gathered_of_shares,
        no_plan,
        another_micro_batch_on_one_rank,
        other_micro_steps,
        no_such_micro_step,
        live_routes_of_other_counts,
        live_routes_of_other_counts_with_the_plan_alone,
        routers_free_though_routes_were_announced,
        and_another_micro_step_begins,
        and_another_step_begins,
        more_to_replicas_than_there_is,
        no_forward,
        two_forwards,
        rows_of_another_batch,
        checkpointed_by_hand,
        checkpointed_by_hand_reentrant,
        state_of_a_shard,
        state_into_a_shard,
        state_of_one_rank,
    )
}


def other_weights(rank):
    hf.distribute(tiny("qwen3_moe", seed=rank))


def frozen_on_one_rank(rank):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(rank == 0)
    hf.distribute(model)


def indivisible(rank):
    hf.distribute(build("qwen3_moe", num_experts=7))


def twice(rank):
    model = tiny("qwen3_moe")
    hf.distribute(model)
    hf.distribute(model)


def forward_of_others(rank):
    model = tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.forward = experts.forward
    hf.distribute(model)


def undeclared_layout(rank):
    hf.distribute(build("llama4"))


def no_experts(rank):
    hf.distribute(tiny("qwen3_moe").model.layers[0].self_attn)


def older_torch(rank):
    kept = torch.nn.functional.grouped_mm
    del torch.nn.functional.grouped_mm
    try:
        hf.distribute(tiny("qwen3_moe"))
    finally:
        torch.nn.functional.grouped_mm = kept


def dtensor(rank):
    model = tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    mesh = init_device_mesh("cpu", (2,))
    experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
    hf.distribute(model)


def parametrized(rank):
    model = tiny("qwen3_moe")
    register_parametrization(model.model.layers[1].mlp.experts, "down_proj", nn.Identity())
    hf.distribute(model)


def learnt_activation(rank):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.act_fn = nn.PReLU()
    hf.distribute(model)


def lora(rank):
    config = LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], r=2)
    hf.distribute(get_peft_model(tiny("qwen3_moe"), config))


def meta(rank):
    hf.distribute(tiny("qwen3_moe").to("meta"))


def other_parameter(rank):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.scale = nn.Parameter(torch.ones(8))
    hf.distribute(model)


def in_a_session(rank):
    routed = hf.attach(tiny("qwen3_moe"))
    with routed.record():
        hf.distribute(routed.model)


def uneven_homes(rank):
    home_LE = np.zeros((3, 8), np.int16)
    hf.distribute(tiny("qwen3_moe"), home_LE=home_LE)


def indivisible_on_one_rank(rank):
    hf.distribute(build("qwen3_moe", num_experts=8 - rank), timeout_s=20)


def no_experts_on_one_rank(rank):
    model = tiny("qwen3_moe")
    hf.distribute(model if rank else model.model.layers[0].self_attn, timeout_s=20)


def uneven_homes_on_one_rank(rank):
    home_LE = np.tile(np.arange(8) // (4 + rank), (3, 1))
    hf.distribute(tiny("qwen3_moe"), home_LE=home_LE, timeout_s=20)


def tied_experts(rank):
    model = tiny("qwen3_moe")
    one, other = (model.model.layers[i].mlp.experts for i in (0, 2))
    other.down_proj = one.down_proj
    hf.distribute(model)


def shared_experts_module(rank):
    model = tiny("qwen3_moe")
    model.model.layers[2].mlp.experts = model.model.layers[0].mlp.experts
    hf.distribute(model)


def tied_to_a_dense_parameter(rank):
    model = tiny("qwen3_moe")
    model.heads = nn.ParameterList([model.model.layers[1].mlp.experts.down_proj])
    hf.distribute(model)


def other_buffer(rank):
    model = tiny("deepseek_v3")
    bias = next(b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    bias += rank * torch.arange(len(bias))
    hf.distribute(model)


def experts_in_another_order(rank):
    model = tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    if rank:
        experts.down_proj = nn.Parameter(experts.down_proj.detach().flip(0))
    hf.distribute(model)


ATTACHED = {
    function.__name__: function
    for function in (
        other_weights,
        frozen_on_one_rank,
        indivisible,
        twice,
        forward_of_others,
        undeclared_layout,
        no_experts,
        older_torch,
        dtensor,
        parametrized,
        learnt_activation,
        lora,
        meta,
        other_parameter,
        in_a_session,
        uneven_homes,
        indivisible_on_one_rank,
        no_experts_on_one_rank,
        uneven_homes_on_one_rank,
        tied_experts,
        shared_experts_module,
        tied_to_a_dense_parameter,
        other_buffer,
        experts_in_another_order,
    )
}


def attaching(rank):
    """Distribute models that cannot be; by name, the error."""
    errors = {}
    for name, distribute in ATTACHED.items():
        try:
            distribute(rank)
            errors[name] = "nothing", ""
        except Exception as error:
            errors[name] = type(error).__name__, str(error)
    return errors


def forward_without_a_rank(rank, gone):
    """What the ranks that are left raise."""
    placed = hf.distribute(tiny("qwen3_moe"), timeout_s=20)
    placed.model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda *_: os._exit(1) if rank == gone else None)
    with torch.no_grad():
        placed.model(**batch(rank, 0, 0), use_cache=False)
