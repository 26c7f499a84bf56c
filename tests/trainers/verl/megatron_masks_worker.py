"""One of the ranks of verl's Megatron engine that scores on sampling masks: log-probs and gradients of several runs.

Usage: torchrun --nproc-per-node N -m tests.trainers.verl.megatron_masks_worker POLICY FOLDER RUNS

RUNS is JSON, the settings of `make` by the name of each.
"""

import json
import sys
from pathlib import Path

# isort: off
from tests.trainers.verl.megatron_engines import make  # before verl: no GPU

# isort: on
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

import foreroute.trainers.verl.megatron_sampling_masks as masks
from foreroute.errors import ReplayError
from tests.trainers.verl.masked_book import TEMPERATURE, Scores
from tests.trainers.verl.megatron_worker import sum_log_prob
from tests.trainers.verl.verl_engines import old_log_probs, tensordict

SEQUENCES = 8


def main(policy, folder, runs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scores, rank = Scores(policy, count=SEQUENCES), dist.get_rank()
    for name, settings in json.loads(runs).items():
        torch.save(run(policy, scores, **settings), Path(folder) / f"{name}-{rank}.pt")
        mpu.destroy_model_parallel()  # the next run has other ranks
    dist.destroy_process_group()


def run(policy, scores, **settings):
    engine = make(policy, ranks=2, dtype="float32", use_distributed_optimizer=False, **settings)
    assert type(engine) is masks.MaskedMegatronRoutingReplay
    share = SEQUENCES // mpu.get_data_parallel_world_size()
    first = share * mpu.get_data_parallel_rank()
    batch = {name: values[first : first + share] for name, values in scores.batch().items()}
    td = tensordict(batch, temperature=TEMPERATURE)
    try:
        log_probs, _ = old_log_probs(engine, td)
    except ReplayError as error:
        return {"refused": str(error)}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(td, loss_function=sum_log_prob)
        for chunk in engine.module:
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.main_grad)
    return {
        "first": first,
        "log_probs": log_probs,
        "k3": (output.get("metrics") or {}).get("mismatch/k3", []),
        "gradients": {name: each.detach().clone() for name, each in engine.bridge.export_weights(engine.module)},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
