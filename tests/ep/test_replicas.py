"""Replicas change nothing but roundings: against transformers' "all_to_all", and the plain model on one process.

`executor_properties` has the controls.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from foreroute.ep.compute import StackedReplicas
from foreroute.ep.transfer.engine import TransferOptions
from tests.adapters.hf.model_runs import enable_checkpointing
from tests.ep.executor_properties import distance, fetched_bytes
from tests.ep.spread_steps import ONE_GROUP, TWO_GROUPS, ReplayedStep, SpreadStep, load_spread
from tests.ep.transfer.plans import loads_MLG, split_plan
from tests.roundings import GRADIENT_TERMS, roundings

WAYS = [(3, None, "direct", None), (5, "shared", "host", True)], [(3, None, "direct", False), (None,) * 4]
"""By turns: seed of a plan, slots, paths, and the kind of checkpointing."""
HEAD = {"tp_plan": {"lm_head": "colwise_gather_output"}}
CASES = [
    ("deepseek_v3", 2, ONE_GROUP, torch.bfloat16),
    ("gpt_oss", 2, {**ONE_GROUP, "fsdp_mixed_precision": True}, torch.float32),
    ("qwen3_moe", 2, {"tp_size": 2, "ep_size": 2, **HEAD}, torch.float64),
    ("qwen3_moe", 4, TWO_GROUPS, torch.float64),
    ("qwen3_moe", 4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4, **HEAD}, torch.float64),
    ("deepseek_v3", 4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2, **HEAD}, torch.float32),
    ("qwen3_moe", 4, {"dp_replicate_size": 2, **ONE_GROUP}, torch.float64),
]
"""Every way of spreading, sizes of `DistributedConfig`, each with a family and a precision."""


def steps(rank, folder, sizes, dtype, ways):
    """Log-probs and gradients by "all_to_all", and by each way of executing the same step."""
    num_shared = sizes.get("tp_size", 1)
    theirs = ReplayedStep(load_spread(folder, "all_to_all", dtype, **sizes), rank // num_shared)
    s, found = SpreadStep(rank, folder, sizes, slots=0, dtype=dtype), [theirs.passes()]
    for seed, sharing, paths, use_reentrant in ways:
        s.model.gradient_checkpointing_disable()
        enable_checkpointing(s.model, use_reentrant)
        s.routed.use(TransferOptions(paths=paths or "direct"))
        plan = None if seed is None else split_plan(seed, s.counts_MLGE, s.routed.home_LE, sharing=sharing)
        with s.execute(plan) as execution:
            found.append(s.passes())
        if plan is not None:
            with (
                patch.object(StackedReplicas, "add_returned", lambda self, returned, grads: list(grads)),
                s.execute(plan),
            ):
                lost = s.passes()
        me = s.routed.spread.layers[0].ep_mesh.get_local_rank()
        assert (execution.executed_ML == loads_MLG(execution.plan, s.counts_MLGE)[..., me]).all()
        assert (fetched_bytes(execution)[paths or "direct"] > 0) == (plan is not None)
    # FSDP2 divides those of experts twice in a group of one rank, in float64: findings/fsdp2_divides_twice.sh
    if dtype == torch.float64 and sizes["ep_size"] == sizes.get("fsdp_size", 0) * num_shared:
        for _, grads in (*found, lost):
            scale = dist.get_world_size() // num_shared
            grads |= {name: scale * each for name, each in grads.items() if ".experts." in name}
    return found, lost


def alone(folder, num_batches):
    """The mean over ranks, by the plain model on one process in float64; log-probs by rank."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", trust_remote_code=False, use_safetensors=True
    ).eval()
    found = [ReplayedStep(model, number).passes() for number in range(num_batches)]
    grads = {name: sum(each[name] for _, each in found) / num_batches for name in found[0][1]}
    return [each for each, _ in found], grads


def off(ran, expected):
    """How far log-probs and gradients are; in those of which the latter are expected."""
    parts = [
        {name: each for name, each in expected[1].items() if (".experts." in name) == own} for own in (True, False)
    ]
    of_grads = [distance({name: ran[1][name] for name in part}, part) for part in parts]
    return max(distance({"": ran[0]}, {"": expected[0]}), *of_grads)


@pytest.mark.shows(
    "Hugging Face", '`ep_implementation="foreroute"` under plans: FSDP2, HSDP, TP, several groups, mixed precision'
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_ranks", "sizes", "dtype", "ways"), [(*case, WAYS[number % 2]) for number, case in enumerate(CASES)]
)
def test_a_step_with_replicas_is_that_of_all_to_all(workers, folder_of, family, num_ranks, sizes, dtype, ways):
    """What home experts find is rounded, and so are its sums with others, where "all_to_all" rounds once."""
    outcomes = workers(num_ranks).run(steps, folder_of(family), sizes, dtype, ways)
    is_short = dtype == torch.bfloat16 or "fsdp_mixed_precision" in sizes
    # a part of each rank is off by half a unit, in every layer of three, forth and back; all other sums are alike
    in_short = 3 * 2 * num_ranks * torch.finfo(torch.bfloat16).eps / 2
    bound = in_short if is_short else roundings(GRADIENT_TERMS, dtype)
    for (theirs, *ours), lost in outcomes:
        assert all(ran[1].keys() == theirs[1].keys() for ran in ours)
        assert max(off(ran, theirs) for ran in ours) < bound
        assert off(lost, theirs) > bound, "the control: gradients of replicas are part of these"
    if dtype == torch.float64:
        num_shared = sizes.get("tp_size", 1)
        log_probs, grads = alone(folder_of(family), num_ranks // num_shared)
        if "fsdp_size" not in sizes:  # transformers sums these anew: findings/tensor_parallel_accumulates_norms_anew.sh
            grads = {name: each for name, each in grads.items() if "_norm." not in name}
        for rank, ((_, *ours), _) in enumerate(outcomes):
            assert max(off(ran, (log_probs[rank // num_shared], grads)) for ran in ours) < bound
