"""Data parallel training replays each rank's own sequences: losses and gradients are those of a single process."""

import re
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from foreroute.adapters import hf
from foreroute.core import untouched
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import (
    EXPERTS,
    batch_of,
    enable_checkpointing,
    gradients,
    loss_of,
    random_routes,
    whole,
    with_lora,
)
from tests.ep.spread_models import sharded
from tests.roundings import GRADIENT_TERMS, require_rounded

BATCH = batch_of(9, 9, 6, 6)
"""Each rank takes every second sequence: both have as many tokens, so that the mean of their losses is the loss."""

CASES = [
    ("fsdp", True, False),
    ("fsdp", False, True),
    ("ddp", False, False),
    ("fsdp, with adapters", False, False),
]
"""How it is distributed, whether its checkpoints are reentrant, and whether it is attached before it is distributed."""


def policy(parallel=""):
    if "adapters" not in parallel:
        return tiny("deepseek_v3", experts="grouped_mm")
    model = tiny("qwen3_moe")
    model.enable_input_require_grads()
    return with_lora(model, target_modules=["o_proj"], **EXPERTS)


def base_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_on_rank(rank, parallel, use_reentrant, attach_first):
    """Loss, gradients and telemetry; backward runs outside the session."""
    model = policy(parallel)
    enable_checkpointing(base_of(model), use_reentrant)
    routed = hf.attach(model) if attach_first else None
    wrapped = DistributedDataParallel(model) if parallel == "ddp" else model
    if parallel != "ddp":
        shard(base_of(model))
    routed = routed or hf.attach(model)
    mine = {name: value[rank::2] for name, value in BATCH.items()}
    trace = random_routes(routed.spec, BATCH).select(np.arange(rank, 4, 2))
    with routed.replay(trace, telemetry=True) as session:
        loss = loss_of(wrapped, mine)
    loss.backward()
    return outcome(loss, gradients(model), session)


def outcome(loss, grads, session):
    shared_L, counts_LE = session.agreement().shared_L, session.expert_counts_LE()
    return loss.detach(), grads, torch.from_numpy(shared_L), torch.from_numpy(counts_LE)


def every_case(rank):
    results = []
    for case in CASES:
        results.append(train_on_rank(rank, *case))
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def ranks(workers):
    return workers(2).run(every_case)


@lru_cache
def single(parallel):
    model = policy(parallel).train()
    routed = hf.attach(model)
    with routed.replay(random_routes(routed.spec, BATCH), telemetry=True) as session:
        loss = loss_of(model, BATCH)
        loss.backward()
    return outcome(loss, gradients(model), session)


@pytest.mark.shows("Hugging Face", "DDP and FSDP2, two processes")
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_losses_and_gradients_are_those_of_a_single_process(ranks, case):
    loss, grads, shared_L, counts_LE = single(CASES[case][0].replace("ddp", "fsdp"))
    one, other = (rank[case] for rank in ranks)
    require_rounded((one[0] + other[0]) / 2, loss)
    for rank in (one, other):
        assert rank[1].keys() == grads.keys()
        for name, gradient in grads.items():
            require_rounded(rank[1][name], gradient, GRADIENT_TERMS)
            assert gradient.any(), name
    assert torch.equal(one[2] + other[2], shared_L)
    assert torch.equal(one[3] + other[3], counts_LE)


def weights_after_training(rank, attaching, mended=True):
    """Names of parameters that never moved, and all of them, after three steps of an optimizer made after attaching."""
    model = shard(policy())
    with pytest.MonkeyPatch.context() as patch:
        if not mended:
            patch.setattr(untouched, "reshard", lambda model: None)
            patch.setattr(untouched, "_replaced", lambda standing: [])
            patch.setattr(untouched._Values, "put_back", lambda values: None)
        routed = hf.attach(model) if attaching else None
        optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), full_weights(model)
        mine = {name: value[rank::2] for name, value in BATCH.items()}
        for _ in range(3):
            recording = None
            if routed is not None:
                with torch.no_grad(), routed.record() as recording:
                    model(**mine)
                for group in optimizer.param_groups:  # as one made now would have them
                    group["params"] = list(model.parameters())
            with nullcontext() if recording is None else routed.replay(recording.trace()):
                loss = loss_of(model, mine)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    after = full_weights(model)
    return [name for name in before if torch.equal(before[name], after[name])], after


def full_weights(model):
    return {name: whole(each).detach().clone() for name, each in sharded(model).named_parameters()}


@pytest.mark.slow
def test_an_optimizer_trains_what_it_would_without_attaching_and_recording(workers):
    runs = [workers(2).run(weights_after_training, *case) for case in ((False,), (True,), (True, False))]
    (without, plain), (attached, ours), (lost, _) = (ranks[0] for ranks in runs)
    assert attached == without
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert len(lost) > len(without)  # the control: a forward without backward, and nothing put back


def ask_of_the_page(rank, num_forwards_G):
    """What a rank is told by the function of the decision's page, which is given the forwards of its session."""
    page = (Path(__file__).parents[3] / "docs" / "decisions" / "0013-ranks-without-a-session.md").read_text()
    given = {"torch": torch}
    exec(re.search(r"def require_replayed_alike.*?\n(?=```|\n\n)", page, re.DOTALL).group(), given)
    with nullcontext() if num_forwards_G == [1, 1] else pytest.raises(RuntimeError, match="replayed 0 forwards"):
        given["require_replayed_alike"](num_forwards_G[rank])


def test_a_rank_without_a_session_is_told_on_every_rank_where_all_are_asked(workers):
    workers(2).run(ask_of_the_page, [1, 0])
    workers(2).run(ask_of_the_page, [1, 1])
