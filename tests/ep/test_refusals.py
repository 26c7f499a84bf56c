"""What cannot be executed ends with the same error on every rank, before any row is sent where that can be known.

Each test stands behind the functions that worker processes run for it.
"""

import io
import os
import signal
import tomllib
import warnings
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

from foreroute.adapters import hf
from foreroute.ep.compute import LEAST_TORCH
from foreroute.ep.layer import ExpertLayer
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.errors import ReplayError
from foreroute.testing.models import tiny
from tests.adapters.hf.families import build
from tests.adapters.hf.model_runs import log_probs
from tests.ep.training import Case, batch, policy
from tests.ep.training_worker import all_rows
from tests.ep.transfer.plans import random_plan, split_plan, static_plan

CASE = Case(ranks=2, plan=0)
DOWN = "model.layers.0.mlp.experts.down_proj"


class Situation:
    """A model on two ranks with a plan for it, made anew or again and again the same."""

    def __init__(self, rank, timeout_s=20, group=None):
        model = policy(CASE)
        self.rank, self.routed = rank, hf.attach(model)
        self.placed = hf.distribute(model, group, timeout_s=timeout_s)
        self.rows_M = all_rows(self.routed, CASE, rank, 0)
        self.counts_MLGE = self.routed.gather_counts(self.rows_M)
        self.plan = split_plan(5, self.counts_MLGE, self.placed.home_LE)

    def execute(self, plan=None, counts=None, rows=None, step=0):
        counts = self.counts_MLGE if counts is None else counts
        return self.routed.execute(plan or self.plan, counts, self.rows_M if rows is None else rows, step=step)

    def enter(self, *given, **begun):
        with self.execute(*given, **begun):
            pass

    def forward(self, micro_step):
        self.placed.model(**batch(self.rank, 0, micro_step), use_cache=False)

    def run(self, *micro_steps, replay=True, **begun):
        """A step with forwards of these micro-steps."""
        with self.execute(**begun):
            for m in micro_steps:
                rows = self.rows_M[min(m, 1)]
                with self.routed.replay(rows) if replay else nullcontext():
                    self.forward(min(m, 1))


def inside_of_another(s):
    with s.execute():
        s.enter()


def with_a_backward_behind_it(s):
    losses = []
    with s.routed.execute(s.plan, s.counts_MLGE, s.rows_M):
        for m, rows in enumerate(s.rows_M):
            with s.routed.replay(rows):
                losses.append(log_probs(s.placed.model, batch(s.rank, 0, m)).sum())
    losses[-1].backward()


def with_routers_that_did_otherwise(s):
    """On one rank, as far as it counts what they did."""
    counts = ExpertLayer._counts
    shifted = (lambda layer, ids: counts(layer, ids).roll(1)) if s.rank else counts
    with mock.patch.object(ExpertLayer, "_counts", shifted):
        s.run(0, 1)


def load_state_of_other_homes(s):
    state, home_LE = s.placed.model.state_dict(), s.placed.home_LE
    s.placed.move_homes(np.roll(home_LE, 1, axis=1))
    try:
        s.placed.model.load_state_dict(state)
    finally:
        s.placed.move_homes(home_LE)


def load_state_of_one_rank(s):
    state = s.placed.state_dict()
    s.placed.load_state_dict({**state, DOWN: state[DOWN][:4]})


EARLY = {
    "PlanError: the plan is for 4 ranks, and 2 are here": lambda s: s.enter(random_plan(0, ranks=4, slots=0)),
    "PlanError: ranks hold different plans": lambda s: s.enter(split_plan(5 + s.rank, s.counts_MLGE, s.placed.home_LE)),
    "PlanError: ranks hold different plans (rank 0: step 0, 2 ranks, plan ": lambda s: s.enter(step=s.rank),
    "PlanError: rank 1: the plan is 5; expected what plan() or load_plan() gives": lambda s: s.enter(5 * s.rank),
    "PlanError: rank 1: what was planned is given as 5; expected counts or traces": lambda s: s.enter(
        counts=5 if s.rank else None
    ),
    "PlanError: by the plan; call move_homes": lambda s: s.enter(
        static_plan(s.counts_MLGE, np.roll(s.placed.home_LE, 1, axis=1))
    ),
    "PlanError: the plan is for 2 routed layers of 8 experts, the model has 3 of 8": lambda s: s.enter(
        static_plan(s.counts_MLGE[:, :2]), s.counts_MLGE[:, :2]
    ),
    "CountsError: rank 1: counts have digest": lambda s: s.enter(counts=s.counts_MLGE + s.rank),
    "CountsError: counts are int32 [1, 3, 2, 8], the plan is for integers [2, 3, 2, 8]": lambda s: s.enter(
        counts=s.counts_MLGE[:1]
    ),
    "CountsError: (rank 0: 1 micro-batches; rank 1: 2 micro-batches); expected as many": lambda s: (
        s.routed.gather_counts(s.rows_M[: 1 + s.rank])
    ),
    "TraceError: rank 1: what is to be replayed is a int": lambda s: s.routed.gather_counts(
        [5] if s.rank else s.rows_M
    ),
    "TraceError: rank 1: what is to be replayed is a RoutingSpec": lambda s: s.enter(
        rows=s.routed.spec if s.rank else None
    ),
    "CountsError: rank 1: micro-batch 0 makes": lambda s: s.enter(rows=s.rows_M[:: -1 if s.rank else 1]),
    "CountsError: rank 1: 1 of 2 planned micro-batches are here": lambda s: s.enter(rows=s.rows_M[s.rank :]),
    "CountsError: micro-batch 0 brings other routes than were planned": lambda s: s.run(1),
    "ReplayError: runs under a plan, and outside of a replay of planned routes": lambda s: s.run(0, replay=False),
    "ReplayError: ending step 0: rank 0: 0 of 2 planned micro-batches are here": lambda s: s.enter(),
    "ReplayError: leave that execution before another one begins": inside_of_another,
    "PlacementError: a rank holds only the experts that live on it; save it with torch.distributed": lambda s: (
        torch.save(s.placed.model.state_dict(), io.BytesIO())
    ),
    "PlacementError: would see only the experts that live on this rank": lambda s: (
        s.placed.model.state_dict()[DOWN] + 1
    ),
    "PlacementError: is of other experts than live here": load_state_of_other_homes,
    "PlacementError: down_proj has 4 experts, expected all 8 in order of their ids": load_state_of_one_rank,
}
"""Kind and words of the error: what must end in it, on a `Situation`, before any row is sent."""
LATE = {
    "CountsError: micro-batch 1 brings other routes than were planned": lambda s: s.run(0, 0),
    "CountsError: a forward begins after all 2 planned micro-batches": lambda s: s.run(0, 1, 2),
    "ReplayError: ending step 0: rank 0: 1 of 2 planned micro-batches are here": lambda s: s.run(0),
    "TransferError: no plan of that step is in force, none is; run forward and backward inside": (
        with_a_backward_behind_it
    ),
    "ReplayError: ending step 0: rank 1: step 0, micro-step 0, routed layer 0: the router made": (
        with_routers_that_did_otherwise
    ),
}
"""The same, where rows have been sent before it can be known."""


def executions(rank):
    """Run every case, and after each of them the right one, on the same model; by its words, how both ended."""
    s = Situation(rank)
    return {words: (ending(s, run), ending(s, lambda s: s.run(0, 1))) for words, run in (EARLY | LATE).items()}


def ending(situation, run):
    """The error, and how many all-to-alls there were before it."""
    calls, original = [], dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", lambda *a, **k: calls.append(1) or original(*a, **k)):
        return said_by(run, situation), len(calls)


def said_by(run, *given):
    try:
        run(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def require_said(found, words):
    kind, _, part = words.partition(": ")
    assert (found.partition(":")[0], part in found) == (kind, True), found


@pytest.fixture(scope="module")
def executed(workers):
    return workers(2).run(executions)


@pytest.mark.parametrize("words", [*EARLY, *LATE])
def test_every_rank_ends_with_the_same_error_and_goes_on(executed, words):
    for outcomes in executed:
        (found, all_to_alls), right = outcomes[words]
        require_said(found, words)
        assert all_to_alls == 0 or words in LATE
        assert right == ("nothing", 12)


def with_experts(change, layer=1):
    """A model is distributed after a change of the experts of a layer."""

    def distribute(rank):
        model = tiny("qwen3_moe")
        change(model.model.layers[layer].mlp.experts, rank)
        hf.distribute(model)

    return distribute


def sharded(experts, rank):
    mesh = init_device_mesh("cpu", (2,))
    experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))


def in_another_order(experts, rank):
    experts.down_proj = nn.Parameter(experts.down_proj.detach().flip(0 if rank else ()))


def twice(rank):
    model = tiny("qwen3_moe")
    hf.distribute(model)
    hf.distribute(model)


def in_a_session(rank):
    routed = hf.attach(tiny("qwen3_moe"))
    with routed.record():
        hf.distribute(routed.model)


def on_older_torch(rank):
    kept = torch.nn.functional.grouped_mm
    del torch.nn.functional.grouped_mm
    try:
        hf.distribute(tiny("qwen3_moe"))
    finally:
        torch.nn.functional.grouped_mm = kept


def without_experts_on_one_rank(rank):
    model = tiny("qwen3_moe")
    hf.distribute(model if rank else model.model.layers[0].self_attn, timeout_s=20)


def with_tied_experts(rank):
    model = tiny("qwen3_moe")
    one, other = (model.model.layers[i].mlp.experts for i in (0, 2))
    other.down_proj = one.down_proj
    hf.distribute(model)


def with_experts_tied_to_a_dense_parameter(rank):
    model = tiny("qwen3_moe")
    model.heads = nn.ParameterList([model.model.layers[1].mlp.experts.down_proj])
    hf.distribute(model)


def with_another_buffer(rank):
    model = tiny("deepseek_v3")
    bias = next(b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    bias += rank * torch.arange(len(bias))
    hf.distribute(model)


def adapted(parameter, model=None, merge=False):
    """With LoRA on a parameter of experts."""
    config = LoraConfig(target_parameters=[f"experts.{parameter}"], r=2)
    model = get_peft_model(model or tiny("qwen3_moe"), config)
    if merge:
        model.merge_adapter()
    return model


class Wrapper(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer


def wrapped(rank):
    model = tiny("qwen3_moe")
    model.model.layers[0].mlp.experts = Wrapper(model.model.layers[0].mlp.experts)
    hf.distribute(model)


ATTACHED = {
    "AttachError: ranks differ in model.embed_tokens.weight": lambda rank: hf.distribute(tiny("qwen3_moe", seed=rank)),
    "AttachError: ranks differ in model.layers.0.mlp.experts.down_proj": with_experts(
        lambda experts, rank: experts.down_proj.requires_grad_(rank == 0), layer=0
    ),
    "AttachError: ranks differ in model.layers.1.mlp.experts.down_proj": with_experts(in_another_order),
    "AttachError: is distributed already": twice,
    "AttachError: model.layers.1.mlp.experts has a forward of its own": with_experts(
        lambda experts, rank: setattr(experts, "forward", experts.forward)
    ),
    "AttachError: whose layout transformers does not declare": lambda rank: hf.distribute(build("llama4")),
    "AttachError: has no torch.nn.functional.grouped_mm, which experts on several ranks are computed": on_older_torch,
    "AttachError: model.layers.1.mlp.experts.down_proj is a DTensor": with_experts(sharded),
    "AttachError: has parametrized weights": with_experts(
        lambda experts, rank: register_parametrization(experts, "down_proj", nn.Identity())
    ),
    "AttachError: has a PReLU, an activation that is learnt": with_experts(
        lambda experts, rank: setattr(experts, "act_fn", nn.PReLU())
    ),
    "AttachError: model.layers.0.mlp.experts.base_layer is wrapped by a Wrapper": wrapped,
    "AttachError: gate_up_proj are merged into it": lambda rank: hf.distribute(adapted("gate_up_proj", merge=True)),
    "AttachError: gate_up_proj_bias is adapted as one matrix": lambda rank: hf.distribute(
        adapted("gate_up_proj_bias", tiny("gpt_oss"))
    ),
    "AttachError: down_proj is adapted, and each rank would have one expert": lambda rank: hf.distribute(
        adapted("down_proj", tiny("gpt_oss", num_local_experts=2))
    ),
    "AttachError: is on the meta device": lambda rank: hf.distribute(tiny("qwen3_moe").to("meta")),
    "AttachError: model.layers.1.mlp.experts.scale is torch.float32 [8]": with_experts(
        lambda experts, rank: experts.register_parameter("scale", nn.Parameter(torch.ones(8)))
    ),
    "AttachError: session is open on this model": in_a_session,
    "TopologyError: rank 1: 7 experts cannot be placed evenly on 2 ranks": lambda rank: hf.distribute(
        build("qwen3_moe", num_experts=8 - rank), timeout_s=20
    ),
    "AttachError: rank 0: Qwen3MoeAttention has no experts modules": without_experts_on_one_rank,
    "TopologyError: rank 1: in layer 0, rank 0 is home to 5 experts; expected 4": lambda rank: hf.distribute(
        tiny("qwen3_moe"), home_LE=np.tile(np.arange(8) // (4 + rank), (3, 1)), timeout_s=20
    ),
    "AttachError: model.layers.0.mlp.experts.down_proj and model.layers.2.mlp.experts.down_proj are": with_tied_experts,
    "AttachError: model.layers.1.mlp.experts.down_proj and heads.0 are one parameter": (
        with_experts_tied_to_a_dense_parameter
    ),
    "AttachError: mlp.gate.e_score_correction_bias": with_another_buffer,
}
"""Kind and words of the error: a model that must end in it when it is distributed, of the rank."""


def attaching(rank):
    return {words: said_by(run, rank) for words, run in ATTACHED.items()}


@pytest.fixture(scope="module")
def attached(workers):
    return workers(2).run(attaching)


@pytest.mark.parametrize("words", ATTACHED)
def test_models_that_cannot_be_spread_are_refused_by_name(attached, words):
    first, second = (said[words] for said in attached)
    assert first == second
    require_said(first, words)


def test_what_is_installed_is_what_experts_are_computed_with():
    """The release asks for a torch that has what the code calls."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [line for extra in project["optional-dependencies"].values() for line in extra if line.startswith("torch")]
    assert asked == [f"torch>={LEAST_TORCH}"] * 2
    assert hasattr(torch.nn.functional, "grouped_mm")
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, LEAST_TORCH.split(".")))


def forward_without_a_rank(rank, gone):
    """What the ranks that are left raise."""
    placed = hf.distribute(tiny("qwen3_moe"), timeout_s=20)
    placed.model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda *_: os._exit(1) if rank == gone else None)
    with torch.no_grad():
        placed.model(**batch(rank, 0, 0), use_cache=False)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_the_cell_they_waited_in(doomed):
    left, gone = doomed(2).outcomes(forward_without_a_rank, 1)
    assert gone is None
    assert left.kind == "TransferError"
    assert "the counts of routed layer 2: rank 0 got no answer from another rank" in left.message


def out_of_order(rank):
    """A step in which rank 1 begins another micro-step than rank 0."""
    Situation(rank, 5, dist.new_group(timeout=timedelta(seconds=5))).run(rank)


@pytest.mark.slow
def test_a_rank_that_begins_another_micro_step_ends_the_others(doomed):
    """It alone can know, since no rank asks another while a step runs."""
    other, wrong = doomed(2).outcomes(out_of_order)
    assert (wrong.kind, "micro-batch 0 brings other routes" in wrong.message) == ("CountsError", True)
    assert other.kind == "TransferError"
    assert "tokens of step 0, micro-step 0, routed layer 0" in other.message


def questions(rank):
    """How often the ranks asked each other on the host: in the passes of a step, and before its optimizer's step."""
    s, asked = Situation(rank), []

    def noting(call):
        return lambda *args, **kwargs: asked.append(1) or call(*args, **kwargs)

    calls = {name: getattr(RankConsensus, name) for name in ("objections", "most", "gather", "from_first")}
    with (
        mock.patch.multiple(RankConsensus, **{name: noting(call) for name, call in calls.items()}),
        s.execute(),
    ):
        asked.clear()
        for m, rows in enumerate(s.rows_M):
            with s.routed.replay(rows):
                log_probs(s.placed.model, batch(rank, 0, m)).sum().backward()
        in_passes = len(asked)
    return in_passes, len(asked)


def test_no_rank_asks_another_on_the_host_while_a_step_runs(workers):
    assert workers(2).run(questions) == [(0, 1)] * 2


def publications(rank):
    """How often weights are taken up in executions of one step, and of none in particular."""
    s, found = Situation(rank), []
    s.placed.use(TransferOptions())
    for step in (7, 7, None, None):
        with s.routed.execute(s.plan, s.counts_MLGE, s.rows_M, step=step) as execution, torch.no_grad():
            for m, rows in enumerate(s.rows_M):
                with s.routed.replay(rows):
                    s.forward(m)
        found.append([record.kind for record in execution.transfers].count("publish"))
    return found


def test_executions_of_one_step_take_up_weights_once(workers):
    assert workers(2).run(publications) == [[1, 0, 1, 1]] * 2


def exchanges_told(rank):
    """Warnings of a step whose rows are all known, and of one in which a rank has others."""
    s, found = Situation(rank), []
    for missing in ("last", "second" if rank else "last"):
        rows_M = all_rows(s.routed, replace(CASE, missing=missing), rank, 0)
        counts_MLGE = s.routed.gather_counts(rows_M)
        with warnings.catch_warnings(record=True) as told, suppress(ReplayError):
            warnings.simplefilter("always")
            s.enter(static_plan(counts_MLGE, s.placed.home_LE), counts_MLGE, rows_M)
        found.append([str(each.message) for each in told if "exchange counts" in str(each.message)])
    return found


def test_all_ranks_say_when_one_has_rows_that_no_plan_knows(workers):
    for known, unknown in workers(2).run(exchanges_told):
        assert known == []
        assert len(unknown) == 1
        assert unknown[0].startswith("in 2 of 2 micro-steps some rank has rows without a route")


def shared(rank, way):
    def make():
        assert rank == 0, "the first rank plans"
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no room to plan")

    hf.distribute(tiny("qwen3_moe"), timeout_s=20).share_plan(make)


def test_a_planner_that_fails_ends_all(workers):
    first, second = workers(2).outcomes(shared, "failing")
    assert (first.kind, first.message) == ("RuntimeError", "no room to plan")
    assert (second.kind, second.message) == ("PlanError", "rank 0 made no plan; look for the first error in its log")


def test_a_planning_rank_that_dies_ends_the_others(doomed):
    outcomes = doomed(2).outcomes(shared, "killed")
    assert outcomes[0] is None
    assert outcomes[1].kind == "TransferError", outcomes[1].trace
    assert "A process died" in outcomes[1].message
