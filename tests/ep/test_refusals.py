"""What cannot be executed ends with the same error on every rank, before any row is sent where that can be known.

Each test stands behind the functions that worker processes run for it.
"""

import os
import signal
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from foreroute.adapters import hf
from foreroute.adapters.hf.expert_parallel import SITE, ForerouteEP
from foreroute.adapters.hf.spreading import spread_over
from foreroute.ep.execution import CellWork
from foreroute.ep.transfer.engine import TransferOptions
from tests.adapters.hf.model_runs import log_probs
from tests.ep.asking import asking
from tests.ep.spread_models import load_spread
from tests.ep.spread_steps import LAYERS, MICRO_STEPS, ONE_GROUP, TWO_GROUPS, SpreadStep
from tests.ep.transfer.plans import random_plan, split_plan, static_plan
from tests.tiers import grid

RIGHT = 2 * LAYERS * MICRO_STEPS
"""All-to-alls of rows in the forwards of a step."""


def enter(s, *given, **begun):
    with s.execute(*given, **begun):
        pass


def run(s, *micro_steps, replay=True):
    """A step with forwards of these micro-steps."""
    with s.execute(), torch.no_grad():
        for m in micro_steps:
            s.log_probs(min(m, 1), replay=replay)


def inside_of_another(s):
    with s.execute():
        enter(s)


def inside_of_another_session(s):
    beside = hf.attach(s.model)
    with s.execute(), beside.execute(s.plan, s.counts_MLGE, s.traces):
        pass


def moving_inside(s):
    beside = hf.attach(s.model)
    with s.execute():
        beside.move_homes(np.roll(s.routed.home_LE, 1, axis=1))


def changing_inside(s):
    with s.execute():
        s.routed.use(TransferOptions(paths="host"))


def with_a_backward_behind_it(s):
    with s.execute(step=None):
        losses = [s.log_probs(m).sum() for m in range(MICRO_STEPS)]
    losses[-1].backward()


def with_other_weights_than_it_began_with(s):
    for _ in range(2):
        with s.execute(step=5), torch.no_grad():
            for m in range(MICRO_STEPS):
                s.log_probs(m)
        for weight in s.model.parameters():  # as an optimizer does
            weight.grad = torch.zeros_like(weight)
        torch.optim.SGD(s.model.parameters(), lr=1.0).step()
        s.model.zero_grad()


def with_routers_that_did_otherwise(s):
    """On one rank, as far as it counts what they did."""
    begin = CellWork.begin
    shifted = (lambda work, counts_E: begin(work, counts_E.roll(1))) if s.rank else begin
    with mock.patch.object(CellWork, "begin", shifted):
        run(s, 0, 1)


EARLY = {
    "PlanError: the plan is for 4 ranks, and 2 are here": lambda s: enter(s, random_plan(0, ranks=4, slots=0)),
    "PlanError: ranks hold different plans": lambda s: enter(s, split_plan(5 + s.rank, s.counts_MLGE, s.plan.home_LE)),
    "PlanError: ranks hold different plans (rank 0: step 0, plan ": lambda s: enter(s, step=s.rank),
    "PlanError: ranks hold different plans (": lambda s: enter(
        s, replace(s.plan, gains={"recompute": 0.5, "update": 0.5 * s.rank})
    ),
    "PlanError: rank 1: the plan is 5; expected what plan() or load_plan() gives": lambda s: enter(
        s, 5 if s.rank else s.plan
    ),
    "PlanError: rank 1: what was planned is given as 5; expected counts or traces": lambda s: enter(
        s, counts=5 if s.rank else None
    ),
    "PlanError: without a plan, whose packing counts traces, expected what gather_counts() gives": lambda s: enter(
        s, None, counts=s.traces
    ),
    "PlanError: rank 0: counts are int32 [2, 3, 2, 7]; expected integers [micro-steps, 3, ranks, 8]": lambda s: enter(
        s, None, counts=s.counts_MLGE[..., :7]
    ),
    "PlanError: by the plan; call move_homes": lambda s: enter(
        s, static_plan(s.counts_MLGE, np.roll(s.plan.home_LE, 1, axis=1))
    ),
    "PlanError: the plan is for 2 routed layers of 8 experts, the model has 3 of 8": lambda s: enter(
        s, static_plan(s.counts_MLGE[:, :2]), s.counts_MLGE[:, :2]
    ),
    "CountsError: rank 1: counts have digest": lambda s: enter(s, counts=s.counts_MLGE + s.rank),
    "CountsError: counts are int32 [1, 3, 2, 8], the plan is for integers [2, 3, 2, 8]": lambda s: enter(
        s, counts=s.counts_MLGE[:1]
    ),
    "CountsError: (rank 0: 1 micro-batches; rank 1: 2 micro-batches); expected as many": lambda s: (
        s.routed.gather_counts(s.traces[: 1 + s.rank])
    ),
    "TraceError: rank 1: what is to be replayed is a int": lambda s: s.routed.gather_counts(
        [5] if s.rank else s.traces
    ),
    "TraceError: rank 1: what is to be replayed is a RoutingSpec": lambda s: enter(
        s, traces=s.routed.spec if s.rank else None
    ),
    "CountsError: rank 1: micro-batch 0 makes": lambda s: enter(s, traces=s.traces[:: -1 if s.rank else 1]),
    "CountsError: rank 1: 1 of 2 planned micro-batches are here": lambda s: enter(s, traces=s.traces[s.rank :]),
    "CountsError: micro-batch 0 brings other routes than were planned": lambda s: run(s, 1),
    "ReplayError: runs under a plan, and outside of a replay of planned routes": lambda s: run(s, 0, replay=False),
    "ReplayError: ending step 0: rank 0: 0 of 2 planned micro-batches are here": lambda s: enter(s),
    "ReplayError: leave that execution before another one begins": inside_of_another,
    "ReplayError: a plan is executed on this model; leave that execution before another": inside_of_another_session,
    "ReplayError: leave that execution before experts move": moving_inside,
    "ReplayError: leave that execution before weights travel in another way": changing_inside,
    "PlanError: homes cannot be moved, and none were: rank 1: got homes of dtype int16 and shape (3, 7)": lambda s: (
        s.routed.move_homes(s.plan.home_LE[:, : 8 - s.rank])
    ),
    "PlanError: ranks are given other homes to move experts to": lambda s: s.routed.move_homes(
        np.roll(s.plan.home_LE, s.rank, axis=1)
    ),
}
"""Kind and words of the error: what must end in it, on a `SpreadStep`, before any row is sent."""
LATE = {
    "CountsError: micro-batch 1 brings other routes than were planned": lambda s: run(s, 0, 0),
    "CountsError: a forward begins after all 2 planned micro-batches": lambda s: run(s, 0, 1, 2),
    "ReplayError: ending step 0: rank 0: 1 of 2 planned micro-batches are here": lambda s: run(s, 0),
    "ReplayError: ending step 0: rank 1: step 0, micro-step 0, routed layer 0: the router made": (
        with_routers_that_did_otherwise
    ),
    "TransferError: hold other weights than its step began with; execute under another step": (
        with_other_weights_than_it_began_with
    ),
    "TransferError: no plan of that step is active, none is; run forward and backward inside": (
        with_a_backward_behind_it
    ),
}
"""The same, where rows have been sent before it can be known."""


def executions(rank, folder, sizes, cases):
    """Run every case, and after each of them the right one, on the same model; by its words, how both ended."""
    s = SpreadStep(rank, folder, sizes)
    return {words: (ending(s, do), ending(s, lambda s: run(s, 0, 1))) for words, do in globals()[cases].items()}


def ending(s, do):
    """The error, and how many all-to-alls of rows there were before it."""
    calls, exchange = [], ForerouteEP._exchange
    with mock.patch.object(ForerouteEP, "_exchange", lambda *given: calls.append(1) or exchange(*given)):
        return said_by(do, s), len(calls)


def said_by(do, *given):
    try:
        do(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def require_said(found, words):
    kind, _, part = words.partition(": ")
    assert (found.partition(":")[0], part in found) == (kind, True), found


@pytest.fixture(scope="module")
def executed(workers, folder_of):
    return {cases: workers(2).run(executions, folder_of(), ONE_GROUP, cases) for cases in ("EARLY", "LATE")}


@pytest.mark.parametrize("words", [*EARLY, *LATE])
def test_every_rank_ends_with_the_same_error_and_goes_on(executed, words):
    for outcomes in executed["EARLY" if words in EARLY else "LATE"]:
        (found, all_to_alls), right = outcomes[words]
        require_said(found, words)
        assert all_to_alls == 0 or words in LATE
        assert right == ("nothing", RIGHT)


def in_group(s):
    return s.rank // 2


def sharing_plans(s, failing=None):
    def make():
        assert s.rank in (0, 2), "the first rank of a group plans"
        if s.rank == failing:
            raise RuntimeError("no room to plan")
        return s.plan

    return s.routed.share_plan(make)


GROUPS = {
    "PlanError: rank 3: the plan is 5; expected": lambda s: enter(s, 5 if s.rank == 3 else s.plan),
    "PlanError: ranks hold different plans (rank 2: step 0, plan ": lambda s: enter(
        s, split_plan(5 + (s.rank == 3), s.counts_MLGE, s.plan.home_LE)
    ),
    "PlanError: groups bring plans that cannot run together (rank 0: step 0, 2 micro-steps, 2 slots by": lambda s: (
        enter(s, step=in_group(s))
    ),
    "PlanError: rank 2: step 0, 2 micro-steps, 1 slots by": lambda s: enter(
        s, split_plan(5, s.counts_MLGE, s.plan.home_LE, slots=2 - in_group(s))
    ),
    "PlanError: rank 2: step 0, 2 micro-steps, 2 slots by 'layer', nodes of 1 ranks": lambda s: enter(
        s, replace(s.plan, topology=replace(s.plan.topology, ranks_per_node=2 - in_group(s)))
    ),
    "CountsError: rank 2: 1 micro-batches; rank 3: 1 micro-batches": lambda s: s.routed.gather_counts(
        s.traces[in_group(s) :]
    ),
    "CountsError: rank 3: counts have digest": lambda s: enter(s, counts=s.counts_MLGE + (s.rank == 3)),
    "CountsError: rank 2: micro-batch 0 makes": lambda s: enter(s, traces=s.traces[:: -1 if s.rank == 2 else 1]),
    "TraceError: rank 3: what is to be replayed is a int": lambda s: s.routed.gather_counts(
        [5] if s.rank == 3 else s.traces
    ),
    "PlanError: ranks are given other homes": lambda s: s.routed.move_homes(
        np.roll(s.plan.home_LE, in_group(s), axis=1)
    ),
    "ReplayError: rank 3: 0 of 2 planned micro-batches are here": enter,
}
"""The same in two groups of two ranks, of which one or all ranks of the second are wrong."""


@pytest.mark.slow
def test_both_groups_end_with_the_same_error_and_go_on(workers, folder_of):
    for outcomes in workers(4).run(executions, folder_of(), TWO_GROUPS, "GROUPS"):
        for words, ((found, all_to_alls), right) in outcomes.items():
            require_said(found, words)
            assert all_to_alls == 0
            assert right == ("nothing", RIGHT)


def sharing(rank, folder, sizes, failing):
    """How it ends where one rank cannot plan; then all of them can."""
    s = SpreadStep(rank, folder, sizes)
    ended = said_by(sharing_plans, s, failing)
    assert sharing_plans(s).counts_digest == s.plan.counts_digest
    return ended


FAILED = "RuntimeError: no room to plan"
OTHERS = (
    "PlanError: waiting for the plan of the first rank: rank {}: RuntimeError('no room to plan'), "
    "whose trace is in the log of that rank"
)


@grid(("ranks", "sizes", "failing"), [(2, ONE_GROUP, 0), (4, TWO_GROUPS, 2)], quick=1)
def test_a_planner_that_fails_ends_all(workers, folder_of, ranks, sizes, failing):
    expected = [FAILED if rank == failing else OTHERS.format(failing) for rank in range(ranks)]
    assert workers(ranks).run(sharing, folder_of(), sizes, failing) == expected


def in_unequal_shares(rank, folder):
    """Six experts on four ranks: bits without a plan, and how plans and moves end."""
    s = SpreadStep(rank, folder, TWO_GROUPS)
    unplanned = [s.log_probs(m) for m in range(MICRO_STEPS)]
    with s.execute(None):
        planned = [s.log_probs(m) for m in range(MICRO_STEPS)]
    same = all(map(torch.equal, planned, unplanned))
    return same, said_by(enter, s), said_by(s.routed.move_homes, np.roll(s.routed.home_LE, 1, axis=1))


@pytest.mark.slow
def test_experts_in_shares_of_different_sizes_stay_where_they_are_by_name(workers, folder_of):
    (same, *refused), *others = workers(4).run(in_unequal_shares, folder_of(num_experts=6))
    assert others == [(same, *refused)] * 3
    assert same
    assert all(": rank 0: 6 experts are kept by 4 ranks in shares of different sizes" in each for each in refused)
    assert [each.partition(":")[0] for each in refused] == ["PlanError"] * 2


NOT_OURS = {
    "on one process": AutoModelForCausalLM.from_pretrained,
    "all_to_all": lambda folder: load_spread(folder, "all_to_all"),
    "fsdp_cpu_offload": lambda folder: offloaded(load_spread(folder)),
}


def offloaded(model):
    """As it says of itself: FSDP2 offloads from an accelerator alone."""
    model.config.distributed_config.fsdp_cpu_offload = True
    return model


def asked_of(rank, folder, name):
    """How everything ends that needs spread experts."""
    routed = hf.attach(NOT_OURS[name](folder))
    calls = [
        lambda: routed.gather_counts([]),
        lambda: enter_anything(routed),
        lambda: routed.share_plan(lambda: None),
        lambda: routed.use(TransferOptions(paths="host")),
        lambda: routed.move_homes(np.zeros((LAYERS, 8), np.int16)),
        lambda: routed.home_LE,
        lambda: routed.block_home_LE,
    ]
    return [said_by(call) for call in calls]


def enter_anything(routed):
    with routed.execute(None, np.zeros((1, LAYERS, 2, 8), np.int32), []):
        pass


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_model_whose_experts_foreroute_has_not_spread_is_refused_by_name(workers, folder_of, name):
    for ended in workers(2).run(asked_of, folder_of(), name):
        (found,) = set(ended)
        words = "from where replicas cannot be fetched" if "offload" in name else "are spread over ranks by foreroute"
        require_said(found, f"AttachError: {words}")


def partly_spread(rank, folder):
    model = load_spread(folder)
    del model.model.layers[1].mlp.experts.__dict__[SITE]
    return said_by(hf.attach, model)


def test_a_model_of_which_some_layers_are_spread_is_refused(workers, folder_of):
    for found in workers(2).run(partly_spread, folder_of()):
        require_said(found, "AttachError: 3 routers are replayed, and 2 of their layers have experts that are spread")


def test_transformers_without_a_registry_is_named(monkeypatch):
    monkeypatch.setattr(DistributedConfig, "__dataclass_fields__", {})
    require_said(said_by(spread_over, 2), "ConfigError: has no registry of expert parallelism; install 5.23 or newer")


def regrouped(rank, store, timeout_s):
    """The default group once more, with a timeout as users give it."""
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": 2, "store": dist.FileStore(str(store), 2)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **options)


def without_a_rank(rank, folder, store, how):
    """What the ranks raise of which the second dies, or does something else, in the last layer of a forward."""
    regrouped(rank, store, 5)
    s = SpreadStep(rank, folder)
    with s.execute(), torch.no_grad():
        if how == "dies":
            s.model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda *_: os._exit(1) if rank else None)
        # alone, a rank knows that it replays what was not planned
        s.log_probs(1 if how == "errs" and rank else 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "errs"])
def test_a_rank_that_dies_or_fails_alone_ends_the_others(doomed, folder_of, tmp_path, how):
    """Within the timeout that the user gave."""
    left, gone = doomed(2).outcomes(without_a_rank, folder_of(), tmp_path / "store", how)
    if how == "errs":
        assert (gone.kind, "micro-batch 0 brings other routes" in gone.message) == ("CountsError", True)
        # FSDP2 gathered parameters just then
        assert (left.kind, "Timed out waiting 5000ms" in left.message) == ("RuntimeError", True), left.trace
    else:
        assert gone is None
        assert left.kind == "TransferError", left.trace
        assert "rows of step 0, micro-step 0, routed layer 2: rank 0 got no answer" in left.message


def timeouts(rank, folder, sizes):
    """Of the default group, of the one that transformers exchanges rows on, and of ours, in seconds."""
    from foreroute.ep.transfer.peers import _timeout_of

    spread = SpreadStep(rank, folder, sizes).routed.spread
    ours = [each.group for each in spread.groups[:3]]
    return [_timeout_of(group).total_seconds() for group in (dist.group.WORLD, spread._group, *ours)]


@pytest.mark.slow
def test_ours_wait_no_longer_than_the_user_said_and_groups_of_a_mesh_do(workers, folder_of):
    """The last line is transformers', in docs/experts.md."""
    assert workers(2).run(timeouts, folder_of(), ONE_GROUP) == [[300.0] * 5] * 2
    assert workers(4).run(timeouts, folder_of(), TWO_GROUPS) == [[300.0, 1800.0, 300.0, 300.0, 300.0]] * 4


MOVING = 5
"""Four votes, and the exchange of what each rank holds."""


def questions(rank, folder, sizes, whole):
    """How often the ranks ask on the host: on entering a second execution, in its passes, on leaving, to move homes."""
    s = SpreadStep(rank, folder, sizes)
    traces = s.traces if whole else [without_route(trace, "second") for trace in s.traces]
    counts_MLGE = s.routed.gather_counts(traces)
    plan = split_plan(5, counts_MLGE, s.routed.home_LE, slots=1)

    def enter(step):
        return s.execute(plan, counts_MLGE, traces, step=step)

    with enter(0):
        run_all(s, traces)
    with asking() as asked, enter(1):
        entering = len(asked)
        run_all(s, traces)
        in_passes = len(asked)
    leaving = len(asked) - in_passes
    s.model.zero_grad()
    with asking() as moving:
        s.routed.move_homes(np.roll(s.routed.home_LE, 1, axis=1))
    return entering, in_passes - entering, leaving, len(moving)


def run_all(s, traces):
    for trace, batch in zip(traces, s.batches, strict=True):
        with s.routed.replay(trace, missing="native"):
            log_probs(s.model, batch).sum().backward()


@grid(
    ("ranks", "sizes", "whole", "expected"),
    [
        (2, ONE_GROUP, True, (1, 0, 1, MOVING)),
        (2, ONE_GROUP, False, (2, LAYERS * MICRO_STEPS, 1, MOVING)),
        (4, TWO_GROUPS, True, (2, 0, 1, MOVING)),
    ],
    quick=2,
)
def test_ranks_ask_each_other_on_entering_and_leaving_alone(workers, folder_of, ranks, sizes, whole, expected):
    """Once, and twice to enter where groups join their replicas, or rows lack routes, whose counts no plan knows."""
    assert workers(ranks).run(questions, folder_of(), sizes, whole) == [expected] * ranks


def many_executions(rank, folder):
    """Numbers of process groups behind executions between which transfers are set and closed."""
    s, found = SpreadStep(rank, folder), []
    for _ in range(3):
        run(s, 0, 1)
        found.append(len(dist.distributed_c10d._world.pg_names))
        s.routed.use(TransferOptions())
        s.routed.close()
    return found


def test_groups_of_ranks_are_made_once(workers, folder_of):
    for found in workers(2).run(many_executions, folder_of()):
        assert len(set(found)) == 1


def publications(rank, folder):
    """How often weights are taken up in executions of one step, and of none in particular."""
    s, found = SpreadStep(rank, folder), []
    s.routed.use(TransferOptions(paths="host"))
    for step, with_grad in ((7, False), (7, True), (7, False), (7, False), (None, False), (None, False)):
        with s.execute(step=step) as execution, torch.set_grad_enabled(with_grad):
            for m in range(MICRO_STEPS):
                s.log_probs(m)
        found.append([record.kind for record in execution.transfers].count("publish"))
    s.routed.close()
    return found


def test_executions_of_one_step_take_up_weights_once_and_anew_behind_an_update(workers, folder_of):
    assert workers(2).run(publications, folder_of()) == [[1, 0, 1, 0, 1, 1]] * 2


def without_route(trace, which):
    """Without that of the second token of each sequence, on which others depend, or of the last, on which none does."""
    valid_N = trace.valid_N.copy()
    valid_N[trace.offsets[:-1] + 1 if which == "second" else trace.offsets[1:] - 1] = False
    return replace(trace, valid_N=valid_N)


def planning_until_killed(rank, folder):
    def make():
        os.kill(os.getpid(), signal.SIGKILL)

    SpreadStep(rank, folder).routed.share_plan(make)


@pytest.mark.slow
def test_a_planning_rank_that_dies_ends_the_others(doomed, folder_of):
    outcomes = doomed(2).outcomes(planning_until_killed, folder_of())
    assert outcomes[0] is None
    assert outcomes[1].kind == "TransferError", outcomes[1].trace
    assert "A process died" in outcomes[1].message
