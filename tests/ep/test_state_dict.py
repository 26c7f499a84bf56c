"""A placed model as a whole: its weights, its homes, its gradients, and the models beside it.

Each test stands behind the function that worker processes run for it.
"""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from foreroute.adapters import hf
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import log_probs
from tests.ep.test_training import relative
from tests.ep.training import Case, batch, gradients, num_targets, policy, replaying
from tests.ep.training_worker import all_rows, whole_gradients
from tests.ep.transfer.plans import random_homes, split_plan
from tests.tiers import grid

CASE = Case(ranks=2, plan=0, dtype=torch.float64)
SINGLE = replace(CASE, dtype=torch.float32)
WITHIN = 1e-12
"""In float64, whose rounding is 1.1e-16: sums of some thousand numbers in another order."""


def home_LE(family, seed):
    layers = 2 if family == "deepseek_v3" else 3
    rng = np.random.default_rng(seed)
    return np.stack([random_homes(rng, 8, 2) for _ in range(layers)])


def shuffled(rank, family):
    """Whether state goes out as it came in, under homes of no order, and back into other homes."""
    plain = tiny(family, seed=1).state_dict()
    placed = hf.distribute(tiny(family, seed=1), home_LE=home_LE(family, 2), timeout_s=20)
    out = placed.state_dict()
    same = out.keys() == plain.keys() and all(torch.equal(out[name], tensor) for name, tensor in plain.items())
    other = hf.distribute(tiny(family, seed=5), home_LE=home_LE(family, 3), timeout_s=20)
    other.load_state_dict(out)
    back = other.state_dict()
    return same, all(torch.equal(back[name], tensor) for name, tensor in plain.items())


@grid("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"], quick=1)
def test_state_is_in_logical_order_whatever_the_homes(workers, family):
    assert workers(2).run(shuffled, family) == [(True, True)] * 2


def moved_between_steps(rank, moves, lora):
    """Weights after three Adam steps; `moves` puts the homes elsewhere after each."""
    model = policy(replace(SINGLE, lora=lora))
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    received = 0
    for step in range(3):
        with replaying(routed, SINGLE, rank, step, 0):
            loss = -log_probs(model, batch(rank, step, 0)).sum() / num_targets(2, step)
            loss.backward()
        placed.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if moves:
            received += placed.move_homes(home_LE("qwen3_moe", step), optimizer)
    return placed.state_dict(), received


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_homes_move_between_steps_and_change_nothing(workers, lora):
    stay, move = (workers(2).run(moved_between_steps, moves, lora) for moves in (False, True))
    for (expected, none), (found, received) in zip(stay, move, strict=True):
        assert (none, received > 0) == (0, True)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def homes_changed_after_the_move(rank):
    """The dtype of a model's homes, and whether they stay as they were when the array handed in is written to."""
    placed = hf.distribute(tiny("qwen3_moe"), timeout_s=20)
    mine_LE = home_LE("qwen3_moe", 2).astype(np.int64)
    placed.move_homes(mine_LE)
    mine_LE[:] = mine_LE[:, ::-1].copy()
    return str(placed.home_LE.dtype), np.array_equal(placed.home_LE, home_LE("qwen3_moe", 2))


def test_homes_are_a_copy_of_those_handed_in(workers):
    assert workers(2).run(homes_changed_after_the_move) == [("int16", True)] * 2


def clipped(rank):
    """The norm of all gradients of both models, and how far those of the placed one are off after clipping."""
    model = policy(CASE)
    plain = copy.deepcopy(model)
    placed = hf.distribute(model, home_LE=home_LE("qwen3_moe", 2), timeout_s=20)
    for one, ranks in ((model, [rank]), (plain, [0, 1])):
        for source in ranks:
            (-log_probs(one, batch(source, 0, 0)).sum() / 50).backward()
    placed.sum_gradients()
    norms = float(placed.clip_gradients(0.1)), float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    return norms, off(placed, plain)


def off(placed, plain):
    """The largest relative error of gradients, against the plain model."""
    return float(max(relative(whole_gradients(placed), gradients(plain))))


def test_clipping_is_by_the_norm_of_the_whole_model(workers):
    for (norm, expected), worst in workers(2).run(clipped):
        assert norm == pytest.approx(expected, rel=WITHIN)
        assert expected > 0.1
        assert worst < WITHIN


def unused_on_one_rank(rank):
    """Gradients of a parameter that only rank 1 used, and of one that nobody did."""
    placed = hf.distribute(tiny("qwen3_moe"), timeout_s=20)
    norm, embedding = placed.model.model.norm.weight, placed.model.model.embed_tokens.weight
    if rank == 1:
        norm.grad = torch.ones_like(norm)
    placed.sum_gradients()
    return norm.grad.unique().tolist(), embedding.grad is None


def test_a_parameter_used_on_one_rank_has_a_gradient_on_all_and_one_used_on_none_has_none(workers):
    assert workers(2).run(unused_on_one_rank) == [([1.0], True)] * 2


def beside_a_plain_model(rank):
    """Whether a model made from the same configuration stays as it was, and one copied before."""
    model = policy(CASE)
    before = copy.deepcopy(model)
    twin = type(model)(model.config).to(CASE.dtype)
    twin.load_state_dict(model.state_dict())
    hf.distribute(model, timeout_s=20)
    here = batch(0, 0, 0)
    logits = [one.eval()(**here, use_cache=False).logits for one in (before, twin, model)]
    return torch.equal(logits[0], logits[1]), float((logits[0] - logits[2]).abs().max())


def test_other_models_of_the_same_configuration_never_notice(workers):
    for untouched, difference in workers(2).run(beside_a_plain_model):
        assert untouched
        assert difference < WITHIN


def step_under_a_plan(rank, step, case, group=None, frozen=(), use_reentrant=None):
    """How far gradients of a micro-step of two ranks are off, with replicas."""
    model = policy(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    plain = copy.deepcopy(model)
    routed, plainly = hf.attach(model), hf.attach(plain)
    placed = hf.distribute(model, group, timeout_s=20)
    for layer in placed.layers if use_reentrant is not None else ():
        layer.module.forward = partial(checkpoint, layer.module.forward, use_reentrant=use_reentrant)
    rows_M = all_rows(routed, case, rank, step)[:1]
    counts_MLGE = routed.gather_counts(rows_M)
    with routed.execute(split_plan(3, counts_MLGE, placed.home_LE), counts_MLGE, rows_M), routed.replay(rows_M[0]):
        log_probs(model, batch(rank, step, 0)).sum().backward()
    placed.sum_gradients()
    for source in range(2):
        with replaying(plainly, case, source, step, 0):
            log_probs(plain, batch(source, step, 0)).sum().backward()
    return off(placed, plain)


def frozen_experts(rank):
    return step_under_a_plan(rank, 0, replace(CASE, use_reentrant=True), frozen=[".experts."])


def test_frozen_experts_under_replicas(workers):
    assert max(workers(2).run(frozen_experts)) < WITHIN


def experts_alone(rank):
    return [step_under_a_plan(rank, 0, CASE, use_reentrant=use_reentrant) for use_reentrant in (True, False)]


def test_experts_that_are_checkpointed_without_their_router_find_their_cells_again(workers):
    for both in workers(2).run(experts_alone):
        assert max(both) < WITHIN


def two_groups(rank):
    """In groups of two of four ranks."""
    group = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
    return step_under_a_plan(rank % 2, rank // 2, CASE, group)


@pytest.mark.slow
def test_groups_of_ranks_beside_each_other(workers):
    assert max(workers(4).run(two_groups)) < WITHIN


def padding(rank):
    """Largest difference of logits, over tokens, between padding that is sent and padding that is not."""
    routed = hf.attach(policy(CASE))
    placed = hf.distribute(routed.model, timeout_s=20)
    real_BT = batch(rank, 0, 0)["attention_mask"].bool()
    rows_M = all_rows(routed, CASE, rank, 0)[:1]
    counts_MLGE = routed.gather_counts(rows_M)
    with routed.replay(rows_M[0]):
        everything = placed.model(**batch(rank, 0, 0), use_cache=False).logits
    plan = split_plan(0, counts_MLGE, placed.home_LE)
    with routed.execute(plan, counts_MLGE, rows_M) as execution, routed.replay(rows_M[0]):
        tokens_only = placed.model(**batch(rank, 0, 0), use_cache=False).logits
    executed_L = torch.from_numpy(execution.executed_ML[0])
    dist.all_reduce(executed_L)
    tokens = torch.tensor(int(real_BT.sum()))
    dist.all_reduce(tokens)
    return float((everything - tokens_only)[real_BT].abs().max()), executed_L.tolist() == [2 * int(tokens)] * 3


def test_padding_that_is_not_sent_changes_no_token(workers):
    for difference, tokens_alone in workers(2).run(padding):
        assert difference < WITHIN
        assert tokens_alone
