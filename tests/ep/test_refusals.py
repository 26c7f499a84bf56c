"""What cannot be executed ends with the same error on every rank: with two groups, and models of other kinds."""

import os
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from foreroute.adapters import hf
from foreroute.adapters.hf.expert_parallel import SITE
from tests.ep.executor_properties import LAYERS, enter, require_ended, require_said, said_by
from tests.ep.spread_steps import TWO_GROUPS, SpreadStep, load_spread
from tests.ep.transfer.plans import split_plan
from tests.replay.session_subject import entering

GROUPS = {
    "PlanError: ranks hold different plans (rank 2: step 0, plan ": lambda s: enter(
        s, split_plan(5 + (s.rank == 3), s.counts_MLGE, s.plan.home_LE)
    ),
    "PlanError: groups bring plans that cannot run together (rank 0: step 0, 2 micro-steps, 2 slots by": lambda s: (
        enter(s, step=s.rank // 2)
    ),
    "CountsError: rank 2: 1 micro-batches; rank 3: 1 micro-batches": lambda s: s.routed.gather_counts(
        s.traces[s.rank // 2 :]
    ),
    "PlanError: ranks are given other homes": lambda s: s.routed.move_homes(
        np.roll(s.plan.home_LE, s.rank // 2, axis=1)
    ),
    "ReplayError: rank 3: 0 of 2 planned micro-batches are here": enter,
}
"""Class and words of the error, before any row is sent: one or all ranks of the second of two groups are wrong."""


def both_groups(rank, folder):
    s = SpreadStep(rank, folder, TWO_GROUPS)
    for words, do in GROUPS.items():
        require_ended(s, words, do)


@pytest.mark.slow
def test_both_groups_end_with_the_same_error_and_go_on(workers, folder_of):
    workers(4).run(both_groups, folder_of())


NOT_OURS = {
    "on one process": AutoModelForCausalLM.from_pretrained,
    "all_to_all": lambda folder: load_spread(folder, "all_to_all"),
    "fsdp_cpu_offload": lambda folder: offloaded(load_spread(folder)),
}


def offloaded(model):
    """As it says of itself: FSDP2 offloads from an accelerator alone."""
    model.config.distributed_config.fsdp_cpu_offload = True
    return model


def not_ours(rank, folder):
    for name, load in NOT_OURS.items():
        routed = hf.attach(load(folder))
        words = "from where replicas cannot be fetched" if "offload" in name else "are spread over ranks by foreroute"
        for call in (
            partial(routed.gather_counts, []),
            entering(routed.execute, None, np.zeros((1, LAYERS, 2, 8), np.int32), []),
            partial(getattr, routed, "home_LE"),
        ):
            require_said(said_by(call), f"AttachError: {words}")


def test_a_model_whose_experts_foreroute_has_not_spread_is_refused_by_name(workers, folder_of):
    workers(2).run(not_ours, folder_of())


def partly_spread(rank, folder):
    model = load_spread(folder)
    del model.model.layers[1].mlp.experts.__dict__[SITE]
    said = "AttachError: 3 routers are replayed, and 2 of their layers have experts that are spread"
    require_said(said_by(hf.attach, model), said)


@pytest.mark.slow
def test_a_model_of_which_some_layers_are_spread_is_refused(workers, folder_of):
    workers(2).run(partly_spread, folder_of())


def without_a_rank(rank, folder, store):
    """The second rank dies in the last layer of a forward, in a group with a timeout as users give it."""
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": 2, "store": dist.FileStore(str(store), 2)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=3), **options)
    s = SpreadStep(rank, folder)
    with s.execute(), torch.no_grad():
        s.model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda *_: os._exit(1) if rank else None)
        s.log_probs(0)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(doomed, folder_of, tmp_path):
    """Within the timeout that the user gave."""
    left, gone = doomed(2).outcomes(without_a_rank, folder_of(), tmp_path / "store")
    assert gone is None
    assert left.error == "TransferError", left.trace
    assert "rows of step 0, micro-step 0, routed layer 2: rank 0 got no answer" in left.message
