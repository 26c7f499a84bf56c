"""What is true of plans that any framework executes: what ends all of its ranks, and functions of a `PlannedStep`."""

import itertools
import traceback
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from foreroute.ep.execution import CellWork
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.layout import pack_sequences
from foreroute.plan.options import PASS_NAMES
from foreroute.testing.routes import synthetic_trace
from tests.ep.transfer.plans import least_fetches_L, loads_MLG, random_plan, split_plan, static_plan
from tests.roundings import GRADIENT_TERMS, roundings

MICRO_STEPS, LAYERS = 2, 3
RIGHT = 2 * LAYERS * MICRO_STEPS
"""All-to-alls of rows in the forwards of a step."""
IN_SLOTS = 2 * 2  # tensors of shared slots: of the cell that runs and of the next one, two names each
LOST = 1e-3
"""Of the largest gradient, at least, what is lost without those of replicas."""


class PlannedStep:
    """What a framework says of itself: a model of three routed layers of 8 experts, and a step for it on this rank.

    - `rank`, `model`, `routed`, `traces` of two micro-steps, `counts_MLGE` of all ranks; `plan` with replicas, or None.
    - `attach()`: the model once more; `log_probs(micro_step, replay=True)`: [tokens], of a forward.
    - `gradients()`: by name, and none are left; `expert_bytes()`: of the weights of one expert.
    - `put_elsewhere()` replaces the parameters of a layer's experts by others of the same weights.
    """

    variants = ({},)
    """Of experts that compute in other ways, what makes each."""
    not_cut = ""
    """What is said of what is no route that can be executed."""

    def left_alone(self):
        """What an execution, ended in whatever way, leaves as it was."""
        return

    def execute(self, plan=..., counts=None, traces=None, step=0):
        counts = self.counts_MLGE if counts is None else counts
        given = self.plan if plan is ... else plan
        return self.routed.execute(given, counts, self.traces if traces is None else traces, step=step)

    def update(self):
        """Forward and backward of all micro-batches: losses, in which ranks are alike in weight."""
        losses = [-self.log_probs(m).mean() / MICRO_STEPS for m in range(MICRO_STEPS)]
        # all are in flight: each recomputes its own cells
        for loss in losses:
            loss.backward()
        return [loss.item() for loss in losses]


def enter(s, *given, **begun):
    with s.execute(*given, **begun):
        pass


def run(s, *micro_steps, replay=True):
    with s.execute(), torch.no_grad():
        for m in micro_steps:
            s.log_probs(min(m, 1), replay=replay)


def inside(s, do, *given):
    with s.execute():
        do(*given)


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


def of_other_tokens(s):
    plan = replace(s.plan, packing=pack_sequences([3] * 4, 2, 3), tokens_digest="0" * 32)
    enter(s, plan, synthetic_trace(s.routed.spec, [3] * 4, seed=0))


EARLY = {
    "PlanError: the plan is for 4 ranks, and 2 are here": lambda s: enter(s, random_plan(0, ranks=4, slots=0)),
    "PlanError: ranks hold different plans": lambda s: enter(s, split_plan(5 + s.rank, s.counts_MLGE, s.plan.home_LE)),
    "PlanError: rank 1: the plan is 5; expected what plan() or load_plan() gives": lambda s: enter(
        s, 5 if s.rank else s.plan
    ),
    "PlanError: without a plan, whose packing counts traces, expected what gather_counts() gives": lambda s: enter(
        s, None, counts=s.traces
    ),
    "PlanError: rank 0: counts are int32 [2, 3, 2, 7]; expected integers [micro-steps, 3, ranks, 8]": lambda s: enter(
        s, None, counts=s.counts_MLGE[..., :7]
    ),
    "PlanError: rank 0: the plan was made for tokens with digest": of_other_tokens,
    "PlanError: by the plan; call move_homes": lambda s: enter(
        s, static_plan(s.counts_MLGE, np.roll(s.plan.home_LE, 1, axis=1))
    ),
    "PlanError: the plan is for 2 routed layers of 8 experts, the model has 3 of 8": lambda s: enter(
        s, static_plan(s.counts_MLGE[:, :2]), s.counts_MLGE[:, :2]
    ),
    "CountsError: rank 1: counts have digest": lambda s: enter(s, counts=s.counts_MLGE + s.rank),
    "CountsError: (rank 0: 1 micro-batches; rank 1: 2 micro-batches); expected as many": lambda s: (
        s.routed.gather_counts(s.traces[: 1 + s.rank])
    ),
    "CountsError: rank 1: micro-batch 0 makes": lambda s: enter(s, traces=s.traces[:: -1 if s.rank else 1]),
    "ReplayError: runs under a plan, and outside of a replay of planned routes": lambda s: run(s, 0, replay=False),
    "ReplayError: ending step 0: rank 0: 0 of 2 planned micro-batches are here": lambda s: enter(s),
    "ReplayError: leave that execution before another one begins": lambda s: inside(s, enter, s),
    "ReplayError: a plan is executed on this model; leave that execution before another": lambda s: inside(
        s, s.attach().execute(s.plan, s.counts_MLGE, s.traces).__enter__
    ),
    "ReplayError: leave that execution before experts move": lambda s: inside(
        s, s.attach().move_homes, np.roll(s.routed.home_LE, 1, axis=1)
    ),
    "ReplayError: leave that execution before weights travel in another way": lambda s: inside(
        s, s.routed.use, TransferOptions(paths="host")
    ),
    "PlanError: homes cannot be moved, and none were: rank 1: got homes of dtype int16 and shape (3, 7)": lambda s: (
        s.routed.move_homes(s.plan.home_LE[:, : 8 - s.rank])
    ),
    "PlanError: ranks are given other homes to move experts to": lambda s: s.routed.move_homes(
        np.roll(s.plan.home_LE, s.rank, axis=1)
    ),
}
"""Class and words of the error: what must end in it, before any row is sent."""
LATE = {
    "CountsError: micro-batch 1 brings other routes than were planned": lambda s: run(s, 0, 0),
    "CountsError: a forward begins after all 2 planned micro-batches": lambda s: run(s, 0, 1, 2),
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


def distance(found, expected):
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[name].double() - each.double()).abs().max()) for name, each in expected.items()) / largest


def fetched_bytes(execution):
    fetches = [each for each in execution.transfers if each.operation == "fetch"]
    return {path: sum(getattr(each, f"{path}_bytes") for each in fetches) for path in ("host", "direct")}


def copied(rows):
    """In memory of its own, at the same place of it."""
    memory = rows.untyped_storage().clone()
    return rows.new_empty(0).set_(memory, rows.storage_offset(), rows.size(), rows.stride())


def check_what_is_no_route_is_refused(make):
    s = make()
    wrong = [s.traces[0], 5] if s.rank else s.traces
    for do in (lambda s: s.routed.gather_counts(wrong), lambda s: enter(s, traces=wrong)):
        require_said(said_by(do, s), f"TraceError: rank 1: {s.not_cut}")
    require_said(said_by(enter, s, s.plan, 5), "PlanError: what was planned is given as 5; expected counts or traces")


def check_a_step_under_a_plan_is_the_step_without(make):
    """With activations kept and recomputed; each rank computes the rows that were planned for it."""
    bound = roundings(GRADIENT_TERMS, torch.float64)
    for checkpointed in (False, True):
        s = make(checkpointed=checkpointed, dtype=torch.float64)
        losses, grads = s.update(), s.gradients()
        assert s.plan.num_replicas_ML.any()
        for plan in (None, s.plan):
            with s.execute(plan) as execution:
                found = s.update()
            assert np.allclose(found, losses, rtol=bound, atol=0)
            assert distance(s.gradients(), grads) < bound
            assert (execution.executed_ML == loads_MLG(execution.plan, s.counts_MLGE)[..., s.rank]).all()


def check_the_comparison_sees_what_is_lost_or_sent_elsewhere(make):
    wait, wait_grads, begin, filled = Replicas.wait, Replicas.wait_grads, CellWork.begin, set()

    def without_weights(replicas):
        wait(replicas)
        replicas.weights = {name: copied(each).zero_() for name, each in replicas.weights.items()}

    def filled_once(replicas):
        (without_weights if replicas in filled else wait)(replicas)
        filled.add(replicas)

    def without_grads(replicas):
        returned = wait_grads(replicas).items()
        return {name: {row: 0 * grad for row, grad in of_rows.items()} for name, of_rows in returned}

    def other_rows(work, counts_E):
        rows = begin(work, counts_E)
        return rows._replace(send_permutation=rows.send_permutation.roll(1))

    s = make(dtype=torch.float64)
    losses, grads = s.update(), s.gradients()
    for of, name, broken in (
        (Replicas, "wait", without_weights),
        (Replicas, "wait", filled_once),
        (Replicas, "wait_grads", without_grads),
        (CellWork, "begin", other_rows),
    ):
        with mock.patch.object(of, name, broken), s.execute():
            found = s.update()
        of_losses = max(abs(one / other - 1) for one, other in zip(found, losses, strict=True))
        off = torch.tensor([of_losses, distance(s.gradients(), grads)])
        dist.all_reduce(off, dist.ReduceOp.MAX)
        assert (off[0] < 1e-9) == (broken in (filled_once, without_grads)), (broken, off)
        assert off[1] > LOST, (broken, off)


def check_recomputation_and_the_backward_behind_it_share_a_fetch(make):
    """To a slot that is kept, a replica travels once in a step, however often its cell runs, and by either path."""
    for checkpointed in (False, True):
        s = make(checkpointed=checkpointed)
        plan = split_plan(5, s.counts_MLGE, s.routed.home_LE, sharing="layer")
        for paths, other in (("host", "direct"), ("direct", "host")):
            s.routed.use(TransferOptions(paths=paths))
            with s.execute(plan) as execution:
                for m in range(MICRO_STEPS):
                    s.log_probs(m).sum().backward()
            s.gradients()
            fetched = fetched_bytes(execution)
            num_bytes = torch.tensor([fetched[paths], fetched[other]])
            dist.all_reduce(num_bytes)
            expected = [least_fetches_L(plan).sum() * s.expert_bytes(), 0]
            assert num_bytes.tolist() == expected, (paths, checkpointed, num_bytes, expected)
        s.routed.use(TransferOptions())
    assert 0 < least_fetches_L(plan).sum() < plan.num_replicas_ML.sum()


def check_what_was_fetched_is_let_go_when_experts_have_computed(make):
    """Behind a forward it lies in slots or is free, and behind a step all of it is free."""
    wait = Replicas.wait
    for how, is_kept in [*((each, False) for each in ({"checkpointed": True}, *make().variants)), ({}, True)]:
        s, fetched, alive, kept = make(**how), [], [], []
        plan = split_plan(5, s.counts_MLGE, s.routed.home_LE, sharing="shared")

        def waited(replicas, fetched=fetched, kept=kept, is_kept=is_kept):
            wait(replicas)
            if is_kept:  # the control
                replicas.weights = {name: copied(each) for name, each in replicas.weights.items()}
                kept.append(replicas.weights)
            fetched.extend(StorageWeakRef(each.untyped_storage()) for each in replicas.weights.values())

        with mock.patch.object(Replicas, "wait", waited), s.execute(plan):
            losses = []
            for m in range(MICRO_STEPS):
                losses.append(s.log_probs(m).sum())
                alive.append(len({storage.cdata for storage in fetched if not storage.expired()}))
            sum(losses).backward()
        s.gradients()
        kept.clear()
        assert not [storage for storage in fetched if not storage.expired()], how
        assert (max(alive) <= IN_SLOTS < len(fetched)) != is_kept, (how, alive)


def check_executions_of_one_step_take_up_weights_once_and_anew_behind_an_update(make):
    s, found = make(), []
    s.routed.use(TransferOptions(paths="host"))
    for step, with_grad in ((7, False), (7, True), (7, False), (7, False), (None, False), (None, False)):
        with s.execute(step=step) as execution, torch.set_grad_enabled(with_grad):
            for m in range(MICRO_STEPS):
                s.log_probs(m)
        found.append([record.operation for record in execution.transfers].count("publish"))
    s.routed.use(TransferOptions())
    assert found == [1, 0, 1, 0, 1, 1]


def check_rows_are_launched_before_the_weights_of_their_cell(make):
    """On one communicator they would wait behind these. Gradients of weights go home before rows are sent back."""
    log, all_to_all, fetch, send = [], dist.all_to_all_single, TransferEngine.fetch, TransferEngine.return_grads
    s = make()
    with (
        mock.patch.object(dist, "all_to_all_single", lambda *a, **k: log.append("rows") or all_to_all(*a, **k)),
        mock.patch.object(TransferEngine, "fetch", lambda engine, cell: log.append("weights") or fetch(engine, cell)),
        mock.patch.object(TransferEngine, "return_grads", lambda *given: log.append("gradients") or send(*given)),
        s.execute(),
    ):
        s.update()
    s.gradients()
    assert log.count("weights") >= MICRO_STEPS
    assert all(log[place - 1] == "rows" for place, what in enumerate(log) if what == "weights"), log
    assert log.count("gradients") >= MICRO_STEPS
    assert all(log[place - 1] == "weights" for place, what in enumerate(log) if what == "gradients"), log


def check_ranks_ask_each_other_on_entering_and_leaving_alone(make):
    """Once each, and not at all in the passes of an execution that is not the first."""
    s = make()
    run(s, 0, 1)
    with mock.patch.object(dist, "all_gather", side_effect=dist.all_gather) as asked, s.execute():
        found = [asked.call_count]
        s.update()
        found.append(asked.call_count)
    s.gradients()
    assert [*found, asked.call_count] == [1, 1, 2]


def check_a_pass_that_saves_too_little_runs_at_home_and_moves_nothing(make):
    s = make()
    for pass_name, at_home in itertools.product(PASS_NAMES, (False, True)):
        plan, found = replace(s.plan, gains=dict.fromkeys(PASS_NAMES, 0.3) | {pass_name: 0.3 - 0.291 * at_home}), []
        for given in (None, plan) if at_home else (plan,):
            with s.execute(given) as execution, torch.set_grad_enabled(pass_name == "update"):
                log_probs = [s.log_probs(m) for m in range(MICRO_STEPS)]
                if pass_name == "update":
                    sum(each.sum() for each in log_probs).backward()
            found.append([*log_probs, *s.gradients().values()])
        operations = {record.operation for record in execution.transfers}
        assert operations == (set() if at_home else {"fetch", "return"} if pass_name == "update" else {"fetch"})
        assert not at_home or all(map(torch.equal, *found))
        served_ML = loads_MLG(plan.in_pass(pass_name), s.counts_MLGE)[..., s.rank]
        assert (execution.executed_ML == served_ML).all()


def check_a_planner_that_fails_ends_all_ranks(make):
    s = make()
    ended = said_by(s.routed.share_plan, lambda: 1 // 0)
    others = "PlanError: waiting for the plan of the first rank: rank 0: ZeroDivisionError("
    require_said(ended, others if s.rank else "ZeroDivisionError: integer")
    assert s.routed.share_plan(lambda: s.plan).counts_digest == s.plan.counts_digest


def check_parameters_that_were_replaced_are_refused(make):
    """The last one: its model is of no use any more."""
    s = make()
    run(s, 0, 1)
    if s.rank:
        s.put_elsewhere()
    require_said(said_by(enter, s), "TransferError: rank 1: ")
    require_said(said_by(enter, s), "TransferError: are not the home shards")


CHECKS = {name.removeprefix("check_"): check for name, check in vars().copy().items() if name.startswith("check_")}
PROPERTIES = [*EARLY, *LATE, *CHECKS]


def failures(make, asked):
    """By name, the traceback of each of these properties that fails on this rank; `make` gives a `PlannedStep`."""
    make, failed = cache(make), {}  # models are dear, and a property that holds leaves them as they were
    for name in filter(asked.__contains__, PROPERTIES):
        try:
            if name in CHECKS:
                CHECKS[name](make)
            else:
                require_ended(make(), name, (EARLY | LATE)[name], is_early=name in EARLY)
        except Exception:
            failed[name] = traceback.format_exc()
        fails = torch.tensor(float(name in failed))
        dist.all_reduce(fails)
        if fails:  # on any rank: all of them make new models
            make.cache_clear()
    return failed


def require_ended(s, words, do, *, is_early=True):
    """As it is said, before any row is sent where it is early; and the step behind it runs."""
    before = s.left_alone()
    found, all_to_alls = ending(s, do)
    require_said(found, words)
    assert all_to_alls == 0 or not is_early
    assert ending(s, lambda s: run(s, 0, 1)) == ("nothing", RIGHT)
    assert s.left_alone() == before


def ending(s, do):
    """The error, and how many all-to-alls of rows there were before it."""
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as exchanges:
        return said_by(do, s), exchanges.call_count


def said_by(do, *given):
    try:
        do(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def require_said(found, words):
    error, _, part = words.partition(": ")
    assert (found.partition(":")[0], part in found) == (error, True), found
