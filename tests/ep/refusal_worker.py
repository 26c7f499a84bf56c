"""What worker processes do that must end in an error on all of them."""

import io
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.plan.counts import counts_digest
from foreroute.testing.models import tiny
from tests.adapters.hf.families import build
from tests.adapters.hf.model_runs import log_probs
from tests.ep.planned import split_plan, static_plan
from tests.ep.training import Case, batch, policy, replaying, routes
from tests.ep.training_worker import all_counts, all_rows
from tests.ep.transfer.plans import random_plan

CASE = Case(ranks=2, plan=0)


@dataclass
class Refusal:
    """What must end in an error on all ranks.

    Attributes:
        run: the function that does it.
        kind: of the error.
        message: a part of its message.
        is_late: whether rows were sent before it could be known.
    """

    run: Callable
    kind: str
    message: str
    is_late: bool


EXECUTED, ATTACHED = {}, {}
"""By name: executions that are refused, each a function of a `Situation`; and models, each a function of the rank."""


def refused(table, kind, message, *, is_late=False):
    """Put a function into one of the tables."""

    def put(run):
        table[run.__name__] = Refusal(run, kind, message, is_late)
        return run

    return put


def executions(rank):
    """Run every case, and after each of them the right one, on the same model; by name, how both ended."""
    model = policy(CASE)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    counts_MLGE = all_counts(routed, CASE, rank, 0)
    plan = split_plan(5, counts_MLGE, placed.home_LE)
    situation = Situation(placed, routed, plan, counts_MLGE, rank)
    return {name: (execution(situation, each.run), execution(situation, right)) for name, each in EXECUTED.items()}


def execution(situation, run):
    """The error of a case, and how many all-to-alls there were before it ended."""
    with counting_all_to_alls() as calls:
        try:
            run(situation)
        except Exception as error:
            return type(error).__name__, str(error), len(calls)
    return "nothing", "", len(calls)


class Situation:
    """What a case needs."""

    def __init__(self, placed, routed, plan, counts_MLGE, rank):
        self.placed, self.routed, self.plan, self.counts_MLGE, self.rank = placed, routed, plan, counts_MLGE, rank

    @property
    def rows(self):
        return all_rows(self.routed, CASE, self.rank, 0)

    def begin(self, plan=None, counts_MLGE=None, rows=None):
        counts_MLGE = self.counts_MLGE if counts_MLGE is None else counts_MLGE
        self.placed.begin_step(0, plan or self.plan, counts_MLGE, rows or self.rows)

    def forward(self, micro_step=0, *, replay=True):
        session = replaying(self.routed, CASE, self.rank, 0, micro_step) if replay else nullcontext()
        with session, self.placed.executing(micro_step):
            self.placed.model(**batch(self.rank, 0, micro_step), use_cache=False)


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
    s.forward()


@refused(EXECUTED, "PlanError", "the plan is for 4 ranks, and 2 are here")
def other_world_size(s):
    s.begin(random_plan(0, ranks=4, slots=0, shuffled=False))


@refused(EXECUTED, "PlanError", "ranks hold different plans")
def plans_differ(s):
    s.begin(split_plan(5 + s.rank, s.counts_MLGE, s.placed.home_LE))


@refused(EXECUTED, "PlanError", "ranks hold different plans (rank 0: step 0, 2 ranks, plan ")
def steps_differ(s):
    s.placed.begin_step(s.rank, s.plan, s.counts_MLGE)


@refused(EXECUTED, "PlanError", "rank 1: the plan is None; expected what plan() or load_plan() gives")
def no_plan_on_one_rank(s):
    s.placed.begin_step(0, None if s.rank else s.plan, s.counts_MLGE)


@refused(EXECUTED, "PlanError", "rank 1: what was planned is given as 5; expected counts or traces")
def a_number_for_traces_on_one_rank(s):
    s.placed.begin_step(0, s.plan, 5 if s.rank else s.counts_MLGE)


@refused(EXECUTED, "PlanError", "by the plan; call move_homes")
def other_homes(s):
    home_LE = np.roll(s.placed.home_LE, 1, axis=1)
    s.begin(static_plan(s.counts_MLGE, home_LE))


@refused(EXECUTED, "PlanError", "the plan is for 2 routed layers of 8 experts, the model has 3 of 8")
def other_layers(s):
    s.begin(static_plan(s.counts_MLGE[:, :2]), s.counts_MLGE[:, :2])


@refused(EXECUTED, "CountsError", "rank 1: counts have digest")
def other_counts_on_one_rank(s):
    s.begin(counts_MLGE=s.counts_MLGE + s.rank)


@refused(EXECUTED, "CountsError", "counts are int64 [1, 3, 2, 8], the plan is for integers [2, 3, 2, 8]")
def counts_of_another_shape(s):
    s.begin(counts_MLGE=s.counts_MLGE[:1])


@refused(EXECUTED, "CountsError", "rank 0: int64 [1, 3, 8]; rank 1: int64 [2, 3, 8]")
def gathered_of_other_micro_steps(s):
    s.placed.gather_counts(s.counts_MLGE[: 1 + s.rank, :, s.rank])


@refused(EXECUTED, "CountsError", "int64 [2, 3, 4]); expected integers [micro-steps, 3, 8]")
def gathered_of_other_experts(s):
    s.placed.gather_counts(s.counts_MLGE[:, :, s.rank, :4])


@refused(EXECUTED, "CountsError", "float64 [2, 3, 8]); expected integers")
def gathered_of_shares(s):
    s.placed.gather_counts(s.counts_MLGE[:, :, s.rank] / 2)


@refused(EXECUTED, "PlanError", "no plan is in force: call begin_step")
def no_plan(s):
    s.placed.use(s.placed._weights)
    s.forward()


@refused(EXECUTED, "CountsError", "rank 1: micro-batch 0 makes")
def another_micro_batch_on_one_rank(s):
    s.begin(rows=s.rows[:: -1 if s.rank else 1])


@refused(EXECUTED, "CountsError", "rank 1: 1 of 2 planned micro-batches are here")
def fewer_micro_batches_on_one_rank(s):
    s.begin(rows=s.rows[s.rank :])


@refused(EXECUTED, "CountsError", "rank 1: its micro-batches are 5; expected a list of BatchRows")
def a_number_for_rows_on_one_rank(s):
    s.begin(rows=5 if s.rank else None)


@refused(EXECUTED, "CountsError", "; expected a list of BatchRows")
def traces_for_rows_on_one_rank(s):
    s.begin(rows=[routes(s.routed.spec, CASE, s.rank, 0, m) for m in range(2)] if s.rank else None)


@refused(EXECUTED, "PlanError", "micro-step 1 begins after 0 of 2 of the plan have run")
def a_later_micro_step(s):
    s.begin()
    s.forward(1)


@refused(EXECUTED, "PlanError", "micro-step 0 begins after 1 of 2 of the plan have run", is_late=True)
def a_micro_step_again(s):
    s.begin()
    s.forward()
    s.forward()


@refused(EXECUTED, "PlanError", "micro-step 2 begins after 2 of 2 of the plan have run", is_late=True)
def more_micro_steps_than_planned(s):
    s.begin()
    for m in range(2):
        s.forward(m)
    with s.placed.executing(2):
        pass


@refused(EXECUTED, "ReplayError", "ending step 0: rank 0: 1 of 2 planned micro-batches are here", is_late=True)
def fewer_micro_steps_than_planned(s):
    s.begin()
    s.forward()
    s.placed.sum_gradients()


@refused(EXECUTED, "CountsError", "step 0, micro-step 0, routed layer 0: rank")
def live_routes_of_other_counts(s):
    s.begin(rows=live_rows(s))
    s.forward(replay=False)


def live_rows(s):
    masks = [batch(s.rank, 0, m)["attention_mask"].bool().flatten().numpy() for m in range(2)]
    return [BatchRows(planned_N=real_N, sent_N=real_N) for real_N in masks]


@refused(EXECUTED, "ReplayError", "routers made other assignments than", is_late=True)
def routers_free_though_routes_were_announced(s):
    s.begin()
    s.forward(replay=False)
    s.forward(1)
    s.placed.sum_gradients()


@refused(EXECUTED, "ReplayError", "routers made other assignments than", is_late=True)
def and_another_step_begins(s):
    s.begin()
    s.forward(replay=False)
    s.begin()


@refused(EXECUTED, "PlanError", "more than there are; the plan was made for other counts", is_late=True)
def more_to_replicas_than_there_is(s):
    counts_MLGE = np.maximum(s.counts_MLGE - 1, 0)
    plan = replace(s.plan, counts_digest=counts_digest(counts_MLGE))
    rows = [replace(each, routed_LE=counts_MLGE[m, :, s.rank]) for m, each in enumerate(s.rows)]
    s.begin(plan, counts_MLGE, rows)
    s.forward()


@refused(EXECUTED, "ReplayError", "was not executed: no forward of the model ran")
def no_forward(s):
    s.begin()
    with s.placed.executing(0):
        pass


@refused(EXECUTED, "ReplayError", "runs a second time in step 0, micro-step 0, routed layer 0", is_late=True)
def two_forwards(s):
    s.begin()
    with replaying(s.routed, CASE, s.rank, 0, 0), s.placed.executing(0):
        for _ in range(2):
            s.placed.model(**batch(s.rank, 0, 0), use_cache=False)


@refused(EXECUTED, "CountsError", "make it from the batch that the model is called with")
def rows_of_another_batch(s):
    rows, *others = s.rows
    longer = replace(rows, planned_N=np.append(rows.planned_N, False), sent_N=np.append(rows.sent_N, False))
    s.begin(rows=[longer, *others])
    s.forward()


@refused(EXECUTED, "PlacementError", "a rank holds only the experts that live on it; save it with torch.distributed")
def state_of_a_shard(s):
    torch.save(s.placed.model.state_dict(), io.BytesIO())


@refused(EXECUTED, "PlacementError", "would see only the experts that live on this rank")
def arithmetic_on_a_shard(s):
    s.placed.model.state_dict()["model.layers.0.mlp.experts.down_proj"] + 1


@refused(EXECUTED, "PlacementError", "is of other experts than live here")
def state_of_other_homes(s):
    state, home_LE = s.placed.model.state_dict(), s.placed.home_LE
    s.placed.move_homes(np.roll(home_LE, 1, axis=1))
    try:
        s.placed.model.load_state_dict(state)
    finally:
        s.placed.move_homes(home_LE)


@refused(EXECUTED, "PlacementError", "down_proj has 4 experts, expected all 8 in order of their ids")
def state_of_one_rank(s):
    state = s.placed.state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    s.placed.load_state_dict({**state, name: state[name][:4]})


@refused(ATTACHED, "AttachError", "ranks differ in model.embed_tokens.weight")
def other_weights(rank):
    hf.distribute(tiny("qwen3_moe", seed=rank))


@refused(ATTACHED, "AttachError", "ranks differ in model.layers.1.mlp.experts.down_proj")
def frozen_on_one_rank(rank):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(rank == 0)
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "is distributed already")
def twice(rank):
    model = tiny("qwen3_moe")
    hf.distribute(model)
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "model.layers.1.mlp.experts has a forward of its own")
def forward_of_others(rank):
    model = tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.forward = experts.forward
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "whose layout transformers does not declare")
def undeclared_layout(rank):
    hf.distribute(build("llama4"))


@refused(ATTACHED, "AttachError", "has no torch.nn.functional.grouped_mm, which experts on several ranks are computed")
def older_torch(rank):
    kept = torch.nn.functional.grouped_mm
    del torch.nn.functional.grouped_mm
    try:
        hf.distribute(tiny("qwen3_moe"))
    finally:
        torch.nn.functional.grouped_mm = kept


@refused(ATTACHED, "AttachError", "model.layers.1.mlp.experts.down_proj is a DTensor")
def dtensor(rank):
    model = tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    mesh = init_device_mesh("cpu", (2,))
    experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "has parametrized weights")
def parametrized(rank):
    model = tiny("qwen3_moe")
    register_parametrization(model.model.layers[1].mlp.experts, "down_proj", nn.Identity())
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "has a PReLU, an activation that is learnt")
def learnt_activation(rank):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.act_fn = nn.PReLU()
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "is wrapped by a ParamWrapper")
def lora(rank):
    config = LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], r=2)
    hf.distribute(get_peft_model(tiny("qwen3_moe"), config))


@refused(ATTACHED, "AttachError", "is on the meta device")
def meta(rank):
    hf.distribute(tiny("qwen3_moe").to("meta"))


@refused(ATTACHED, "AttachError", "model.layers.1.mlp.experts.scale is torch.float32 [8]")
def other_parameter(rank):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.scale = nn.Parameter(torch.ones(8))
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "session is open on this model")
def in_a_session(rank):
    routed = hf.attach(tiny("qwen3_moe"))
    with routed.record():
        hf.distribute(routed.model)


@refused(ATTACHED, "TopologyError", "rank 1: 7 experts cannot be placed evenly on 2 ranks")
def indivisible_on_one_rank(rank):
    hf.distribute(build("qwen3_moe", num_experts=8 - rank), timeout_s=20)


@refused(ATTACHED, "AttachError", "rank 0: Qwen3MoeAttention has no experts modules")
def no_experts_on_one_rank(rank):
    model = tiny("qwen3_moe")
    hf.distribute(model if rank else model.model.layers[0].self_attn, timeout_s=20)


@refused(ATTACHED, "TopologyError", "rank 1: in layer 0, rank 0 is home to 5 experts; expected 4")
def uneven_homes_on_one_rank(rank):
    home_LE = np.tile(np.arange(8) // (4 + rank), (3, 1))
    hf.distribute(tiny("qwen3_moe"), home_LE=home_LE, timeout_s=20)


@refused(ATTACHED, "AttachError", "model.layers.0.mlp.experts.down_proj and model.layers.2.mlp.experts.down_proj are")
def tied_experts(rank):
    model = tiny("qwen3_moe")
    one, other = (model.model.layers[i].mlp.experts for i in (0, 2))
    other.down_proj = one.down_proj
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "model.layers.1.mlp.experts.down_proj and heads.0 are one parameter")
def tied_to_a_dense_parameter(rank):
    model = tiny("qwen3_moe")
    model.heads = nn.ParameterList([model.model.layers[1].mlp.experts.down_proj])
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "mlp.gate.e_score_correction_bias")
def other_buffer(rank):
    model = tiny("deepseek_v3")
    bias = next(b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    bias += rank * torch.arange(len(bias))
    hf.distribute(model)


@refused(ATTACHED, "AttachError", "ranks differ in model.layers.1.mlp.experts.down_proj")
def experts_in_another_order(rank):
    model = tiny("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    if rank:
        experts.down_proj = nn.Parameter(experts.down_proj.detach().flip(0))
    hf.distribute(model)


def attaching(rank):
    """Distribute models that cannot be; by name, the error."""
    errors = {}
    for name, each in ATTACHED.items():
        try:
            each.run(rank)
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


def out_of_order(rank):
    """A step in which rank 1 begins another micro-step than rank 0."""
    model = policy(CASE)
    routed = hf.attach(model)
    group = dist.new_group(timeout=timedelta(seconds=5))
    placed = hf.distribute(model, group, timeout_s=5)
    situation = Situation(placed, routed, None, all_counts(routed, CASE, rank, 0), rank)
    situation.begin(split_plan(5, situation.counts_MLGE, placed.home_LE))
    situation.forward(rank)


def questions(rank):
    """How often the ranks asked each other on the host: in the passes of a step, and before its optimizer's step."""
    model = policy(CASE)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    situation = Situation(placed, routed, None, all_counts(routed, CASE, rank, 0), rank)
    situation.begin(split_plan(5, situation.counts_MLGE, placed.home_LE))
    with counting_questions() as asked:
        for m in range(2):
            with replaying(routed, CASE, rank, 0, m), placed.executing(m):
                log_probs(model, batch(rank, 0, m)).sum().backward()
        in_passes = len(asked)
        placed.sum_gradients()
    return in_passes, len(asked)


def exchanges_told(rank):
    """Warnings of a step whose rows are all known, and of one whose are not."""
    model = policy(CASE)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    situation = Situation(placed, routed, None, all_counts(routed, CASE, rank, 0), rank)
    situation.plan, found = split_plan(5, situation.counts_MLGE, placed.home_LE), []
    for rows in (None, live_rows(situation) if rank else None):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            situation.begin(rows=rows)
        found.append([str(each.message) for each in told if "exchange counts" in str(each.message)])
    return found


@contextmanager
def counting_questions():
    """Yields a list with an entry for every collective call on the host."""
    asked = []

    def noting(call):
        return lambda *args, **kwargs: asked.append(1) or call(*args, **kwargs)

    with ExitStack() as stack:
        for name in ("objections", "most", "gather", "from_first"):
            stack.enter_context(mock.patch.object(RankConsensus, name, noting(getattr(RankConsensus, name))))
        yield asked
