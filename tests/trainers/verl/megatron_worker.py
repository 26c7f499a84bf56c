"""One of the ranks of verl's Megatron engine: what it did in several runs, saved to a folder.

Usage: torchrun --nproc-per-node N -m tests.trainers.verl.megatron_worker POLICY FOLDER RUNS

RUNS is JSON, the settings of `run` by the name of each.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

# isort: off
from tests.trainers.verl.megatron_engines import Watch, exported, make  # before verl: no GPU

# isort: on
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from foreroute.planner import plan
from foreroute.trainers.verl import planning
from tests.ep.asking import no_host_tensors
from tests.trainers.verl.verl_book import Book, noting_roots
from tests.trainers.verl.verl_engines import mean_log_prob, old_log_probs, tensordict

SEQUENCES, STEPS = 16, 3


def main(policy, folder, runs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, batch = dist.get_rank(), Book(policy, count=SEQUENCES).batch()
    for name, settings in json.loads(runs).items():
        if settings.pop("resumes", False):
            settings["checkpoint"] = Path(folder) / "checkpoint"
        torch.save(run(policy, batch, **settings), Path(folder) / f"{name}-{rank}.pt")
    dist.destroy_process_group()


def run(policy, batch, *, tokens=32, reverse=False, checkpoint=None, **settings):
    """Steps of an old-log-prob pass and an update each; given a checkpoint, by a new engine from the second on.

    Under R2 all updates are on what the first old-log-prob pass recorded.
    """
    engine = make(policy, **settings)
    share = SEQUENCES // mpu.get_data_parallel_world_size()
    first = share * mpu.get_data_parallel_rank()
    batch = {name: values[first : first + share] for name, values in batch.items()}
    if reverse:
        batch = {name: values.flip(0) for name, values in batch.items()}
    found = {name: [] for name in ("log_probs", "metrics", "old", "update", "planned", "judged")}
    found["first"] = first
    recorded = None
    if settings.get("replay") == "R2":
        batch = {name: values for name, values in batch.items() if name != "routed_experts"}
    for step in range(STEPS):
        if step:  # what was sampled before the weights changed
            batch = {name: values for name, values in batch.items() if name != "rollout_log_probs"}
        planned = []
        with mock.patch.object(planning, "plan", noting(planned)), as_on_nccl():
            with Watch(engine) as old, noting_roots(judged := []):
                log_probs, output = old_log_probs(engine, tensordict(batch, max_token_len_per_gpu=tokens))
            td = tensordict(batch, max_token_len_per_gpu=tokens)
            if settings.get("replay") == "R2":
                recorded = over_stages(output) if recorded is None else recorded
                td["routed_experts"] = recorded
            with Watch(engine) as updated, engine.train_mode():
                output = engine.train_batch(td, loss_function=sum_log_prob)
        found["log_probs"].append([row.float() for row in log_probs])
        found["metrics"].append(output.get("metrics"))
        found["judged"].append(judged)
        found["old"].append({"routed": old.routed, "rows_ML": old.rows_ML})
        found["update"].append({"routed": updated.routed, "rows_ML": updated.rows_ML})
        found["planned"].append([loads_MLG(counts, made) for counts, made in planned])
        if checkpoint and step == 0:
            engine.save_checkpoint(str(checkpoint), global_step=1)
            dist.barrier()
            engine = make(policy, **settings)
            engine.load_checkpoint(str(checkpoint), del_local_after_load=False)
    found["weights"] = exported(engine)
    del engine
    mpu.destroy_model_parallel()  # the next run has other ranks
    return found


def sum_log_prob(model_output, data, dp_group):
    """The same over all data, however many ranks share it, between which gradients are averaged."""
    loss, metrics = mean_log_prob(model_output, data, dp_group)
    return loss * dist.get_world_size(dp_group), metrics


def over_stages(output):
    """The routes that the last stage of a pipeline has of an old-log-prob pass, as verl hands them on to all."""
    routes = [output["model_output"]["routed_experts"] if output else None]
    last = mpu.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(routes, last, group=mpu.get_pipeline_model_parallel_group())
    return routes[0]


@contextmanager
def as_on_nccl():
    """What follows the micro-batches of a planned batch hands no tensor of the host to Megatron's own groups."""
    add, groups = (
        planning.PlannedBatch.add_to,
        (mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()),
    )

    def added(*args):
        with no_host_tensors(*groups):
            add(*args)

    with mock.patch.object(planning.PlannedBatch, "add_to", added):
        yield


def noting(planned):
    def noted(counts_MLGE, *args, **kwargs):
        made = plan(counts_MLGE, *args, **kwargs)
        planned.append((counts_MLGE, made))
        return made

    return noted


def loads_MLG(counts_MLGE, made):
    """What a plan has each rank compute, replica by replica."""
    loads = np.zeros(counts_MLGE.shape[:3], np.int64)
    for m, layer in np.ndindex(loads.shape[:2]):
        cell, left_E = made.cell(m, layer), counts_MLGE[m, layer].sum(0).astype(np.int64)
        for expert, rank, tokens_G in zip(cell.expert_R, cell.rank_R, cell.tokens_RG, strict=True):
            loads[m, layer, rank] += tokens_G.sum()
            left_E[expert] -= tokens_G.sum()
        for expert, rank in enumerate(cell.home_E):
            loads[m, layer, rank] += left_E[expert]
    return loads


if __name__ == "__main__":
    main(*sys.argv[1:])
