"""Replicas change nothing but roundings: against transformers' "all_to_all", and the plain model on one process.

`executor_properties` has the controls.
"""

import pytest
import torch

from tests.ep.executor_properties import distance
from tests.ep.replica_steps import SPREAD, Way, alone, steps
from tests.roundings import GRADIENT_TERMS, roundings

WAYS = [Way(3), Way(5, "shared", "host", use_reentrant=True)], [Way(4, use_reentrant=False), Way(None)]
"""By turns."""
CASES = [
    ("deepseek_v3", "one group", torch.bfloat16),
    ("gpt_oss", "mixed precision", torch.float32),
    ("qwen3_moe", "a shared batch", torch.float64),
    ("qwen3_moe", "two groups", torch.float64),
    ("qwen3_moe", "shared batches", torch.float64),
    ("deepseek_v3", "two groups of a batch each", torch.float32),
    ("qwen3_moe", "copies", torch.float64),
]
"""Every way of spreading, each with a family and a precision."""


def bound_of(dtype, num_ranks):
    """What home experts find is rounded, and so are its sums with others, where "all_to_all" rounds once.

    In bfloat16 all other sums are alike.
    """
    return num_ranks * torch.finfo(dtype).eps if dtype == torch.bfloat16 else roundings(GRADIENT_TERMS, dtype)


def off(ran, expected):
    return distance({"": ran.log_probs}, {"": expected.log_probs}), distance(ran.grads, expected.grads)


@pytest.mark.shows(
    "Hugging Face", '`ep_implementation="foreroute"` under plans: FSDP2, HSDP, TP, several groups, mixed precision'
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spread", "dtype", "ways"), [(*case, WAYS[number % 2]) for number, case in enumerate(CASES)]
)
def test_a_step_with_replicas_is_that_of_all_to_all(workers, folder_of, family, spread, dtype, ways):
    num_ranks, config = SPREAD[spread]
    outcomes = workers(num_ranks).run(steps, folder_of(family), spread, dtype, ways)
    bound = bound_of(torch.bfloat16 if spread == "mixed precision" else dtype, num_ranks)
    for way in ways:
        assert max(max(off(found[way], found["all_to_all"])) for found in outcomes) < bound, way
        for found in outcomes:
            planned, executed = found[way].rows
            assert planned == executed, way
        fetched = {path: sum(found[way].fetched[path] for found in outcomes) for path in ("host", "direct")}
        assert (fetched[way.paths] > 0) == (way.plan is not None), (way, fetched)
    if dtype == torch.float64:
        log_probs, grads = alone(folder_of(family), num_ranks // config.get("tp_size", 1))
        for rank, found in enumerate(outcomes):
            truth = log_probs[rank // config.get("tp_size", 1)]
            for way in ways:
                ours = found[way].grads
                assert distance({"": found[way].log_probs}, {"": truth}) < bound, way
                # transformers sums those of norms of heads anew: findings/tensor_parallel_accumulates_norms_anew.sh
                names = [name for name in grads if "fsdp_size" in config or "_norm." not in name]
                assert distance({n: ours[n] for n in names}, {n: grads[n] for n in names}) < bound, way
