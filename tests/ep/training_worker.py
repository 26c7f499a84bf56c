"""What a worker process does: the training of `training`, expert-parallel."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from foreroute import planner
from foreroute.adapters import hf
from foreroute.ep import compute, layer
from foreroute.ep.compute import run_experts
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.plan import PlanOptions, Topology, verify
from tests.adapters.hf.model_runs import log_probs
from tests.ep.training import MICRO_STEPS, STEPS, batch, decisions, num_targets, optimizer_of, policy, replaying
from tests.ep.transfer.plans import LINKS, SLOTS, random_homes, split_plan, static_plan
from tests.ep.transfer.toy import Multiplied


@dataclass
class Load:
    """Assignments of one rank in the layers of one micro-step.

    Attributes:
        planned_L: that the plan has it compute.
        executed_L: that it computed, as the execution tells.
        computed_L: the same, counted in what experts are given.
        sent: of its own rows.
    """

    planned_L: list[int]
    executed_L: list[int]
    computed_L: list[int]
    sent: int

    @classmethod
    def of(cls, execution, m, computed_L, counts_MLGE, rank, num_sent):
        cells = [(execution.plan.cell(m, layer), counts_GE) for layer, counts_GE in enumerate(counts_MLGE[m])]
        planned_L = [int(cell.loads_G(counts_GE)[rank]) for cell, counts_GE in cells]
        return cls(planned_L, execution.executed_ML[m].tolist(), computed_L, num_sent)


@contextmanager
def counting_rows(placed):
    """How many rows the experts of each layer are given, at home and as replicas; padding is all zeros."""
    number = {id(layer.module): layer.number for layer in placed.layers}
    computed_L = [0] * len(number)

    def counting(module, weights, rows_RD, gates_R1, groups, replicas=None):
        computed_L[number[id(module)]] += int(rows_RD.detach().any(dim=1).sum())
        return run_experts(module, weights, rows_RD, gates_R1, groups, replicas)

    with patch.object(layer, "run_experts", counting), patch.object(compute, "run_experts", counting):
        yield computed_L


TAMPERED = {"lost": 0, "doubled": 2}


def train(rank, case):
    """As `training.train_alone`, with the losses of this rank, the whole model's gradients and weights, and loads."""
    model = policy(case)
    routed = hf.attach(model)
    placed = hf.distribute(model, home_LE=homes(case, routed.spec), timeout_s=20)
    use_weights(placed, case)
    optimizer = optimizer_of(model)
    losses, first, loads, split = [], None, [], []
    for step in range(STEPS):
        loads += train_step(placed, routed, case, rank, step, losses, split)
        placed.sum_gradients()
        first = first or whole_gradients(placed)
        optimizer.step()
        optimizer.zero_grad()
    placed.close()
    return {"losses": losses, "grads": first, "state": placed.state_dict(), "loads": loads, "split": split[:1]}


def use_weights(placed, case):
    placed.use(TransferOptions(paths="host" if case.weights in ("layer", "shared") else "direct"))


def tamper(placed, case):
    """Have gradients of replicas lost, or doubled, on their way home."""
    if case.weights in TAMPERED:
        engine = placed.ranks.engine(placed.homes)
        send_home, factor = type(engine).send_home, TAMPERED[case.weights]
        engine.send_home = lambda cell, grads: Multiplied(send_home(engine, cell, grads), factor)


def train_step(placed, routed, case, rank, step, losses, split):
    """Accumulates the gradients of a step. Returns a `Load` for every micro-step under a plan."""
    execution, rows_M, loads, pending = None, [None] * MICRO_STEPS, [], []
    with ExitStack() as stack:
        if case.plan is not None:
            rows_M = all_rows(routed, case, rank, step)
            counts_MLGE = routed.gather_counts(rows_M)
            plan = make_plan(case, counts_MLGE, placed.home_LE, step)
            execution = stack.enter_context(routed.execute(plan, counts_MLGE, rows_M))
            tamper(placed, case)
            split.append(split_experts(plan))
        for m, rows in enumerate(rows_M):
            with replaying(routed, case, rank, step, m, rows), counting_rows(placed) as computed_L:
                loss = -log_probs(placed.model, batch(rank, step, m)).sum() / num_targets(case.ranks, step)
            if execution is not None:
                num_sent = sent(rows, case, rank, step, m)
                loads.append(Load.of(execution, m, computed_L, counts_MLGE, rank, num_sent))
            pending.append(loss)
            losses.append(loss.item())
        # the micro-steps are all in flight: each recomputes its own cells
        for loss in pending:
            loss.backward()
    return loads


def sent(rows, case, rank, step, m):
    """Assignments of a micro-step that experts are to compute."""
    if case.missing == "second":
        return int(batch(rank, step, m)["attention_mask"].sum()) * rows.trace.spec.top_k
    return int(rows.trace.valid_N.sum()) * rows.trace.spec.top_k


def split_experts(plan):
    """Bool [L, E], whether an expert has a replica in any micro-step."""
    split_LE = np.zeros(plan.shape[1:], np.bool_)
    cell_R = np.repeat(np.arange(len(plan.hosts.offsets) - 1), np.diff(plan.hosts.offsets))
    split_LE[cell_R % plan.shape[1], plan.hosts.expert_R] = True
    return split_LE


def all_rows(routed, case, rank, step):
    """Of all micro-steps of a rank."""
    return [routed.rows(decisions(routed, case, rank, step, m)) for m in range(MICRO_STEPS)]


def make_plan(case, counts_MLGE, home_LE, step):
    if case.plan == "planned":
        options = PlanOptions(slots="shared" if case.weights == "shared" else "layer")
        plan = planner.plan(counts_MLGE, Topology(case.ranks, case.ranks, SLOTS, LINKS), options, home_LE=home_LE)
        verify(plan, counts_MLGE)
        return plan
    if not isinstance(case.plan, int):
        return static_plan(counts_MLGE, home_LE)
    sharing = case.weights if case.weights in ("layer", "shared") else None
    return split_plan(case.plan + 1000 * step, counts_MLGE, home_LE, sharing=sharing)


def homes(case, spec):
    """Shuffled under random plans, in blocks otherwise."""
    if case.plan in (None, "static", "planned"):
        return None
    rng = np.random.default_rng(case.plan if isinstance(case.plan, int) else 0)
    return np.stack([random_homes(rng, spec.num_experts, case.ranks) for _ in range(spec.num_layers)])


def whole_gradients(placed):
    trained = {name: p for name, p in placed.model.named_parameters() if p.grad is not None}
    return {name: placed.whole(parameter, parameter.grad).clone() for name, parameter in trained.items()}
