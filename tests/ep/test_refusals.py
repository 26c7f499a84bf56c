"""What cannot be executed ends with the same error on every rank, before any row is sent where that can be known.

Each test stands behind the functions that worker processes run for it.
"""

import os
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from foreroute.adapters import hf
from foreroute.adapters.hf.expert_parallel import SITE
from tests.ep.executor_properties import RIGHT, ending, enter, require_said, run, said_by
from tests.ep.spread_models import load_spread
from tests.ep.spread_steps import LAYERS, TWO_GROUPS, SpreadStep
from tests.ep.transfer.plans import split_plan


def executions(rank, folder, sizes):
    """Run every case, and after each of them the right one, on the same model; by its words, how both ended."""
    s = SpreadStep(rank, folder, sizes)
    return {words: (ending(s, do), ending(s, lambda s: run(s, 0, 1))) for words, do in GROUPS.items()}


def in_group(s):
    return s.rank // 2


GROUPS = {
    "PlanError: ranks hold different plans (rank 2: step 0, plan ": lambda s: enter(
        s, split_plan(5 + (s.rank == 3), s.counts_MLGE, s.plan.home_LE)
    ),
    "PlanError: groups bring plans that cannot run together (rank 0: step 0, 2 micro-steps, 2 slots by": lambda s: (
        enter(s, step=in_group(s))
    ),
    "CountsError: rank 2: 1 micro-batches; rank 3: 1 micro-batches": lambda s: s.routed.gather_counts(
        s.traces[in_group(s) :]
    ),
    "PlanError: ranks are given other homes": lambda s: s.routed.move_homes(
        np.roll(s.plan.home_LE, in_group(s), axis=1)
    ),
    "ReplayError: rank 3: 0 of 2 planned micro-batches are here": enter,
}
"""Kind and words of the error: what must end in it before any row is sent, in two groups of two ranks.

One or all ranks of the second are wrong. `executor_properties` has what is wrong in one group.
"""


@pytest.mark.slow
def test_both_groups_end_with_the_same_error_and_go_on(workers, folder_of):
    for outcomes in workers(4).run(executions, folder_of(), TWO_GROUPS):
        for words, ((found, all_to_alls), right) in outcomes.items():
            require_said(found, words)
            assert all_to_alls == 0
            assert right == ("nothing", RIGHT)


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
    routed = hf.attach(NOT_OURS[name](folder))
    calls = [
        lambda: routed.gather_counts([]),
        lambda: routed.execute(None, np.zeros((1, LAYERS, 2, 8), np.int32), []).__enter__(),
        lambda: routed.home_LE,
    ]
    return [said_by(call) for call in calls]


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


@pytest.mark.slow
def test_a_model_of_which_some_layers_are_spread_is_refused(workers, folder_of):
    for found in workers(2).run(partly_spread, folder_of()):
        require_said(found, "AttachError: 3 routers are replayed, and 2 of their layers have experts that are spread")


def regrouped(rank, store, timeout_s):
    """The default group once more, with a timeout as users give it."""
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": 2, "store": dist.FileStore(str(store), 2)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **options)


def without_a_rank(rank, folder, store):
    """What the ranks raise of which the second dies in the last layer of a forward."""
    regrouped(rank, store, 3)
    s = SpreadStep(rank, folder)
    with s.execute(), torch.no_grad():
        s.model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda *_: os._exit(1) if rank else None)
        s.log_probs(0)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(doomed, folder_of, tmp_path):
    """Within the timeout that the user gave."""
    left, gone = doomed(2).outcomes(without_a_rank, folder_of(), tmp_path / "store")
    assert gone is None
    assert left.kind == "TransferError", left.trace
    assert "rows of step 0, micro-step 0, routed layer 2: rank 0 got no answer" in left.message


def without_route(trace, which):
    """Without that of the second token of each sequence, on which others depend, or of the last, on which none does."""
    valid_N = trace.valid_N.copy()
    valid_N[trace.offsets[:-1] + 1 if which == "second" else trace.offsets[1:] - 1] = False
    return replace(trace, valid_N=valid_N)
