"""One of the ranks of verl's Megatron engine on a model with multi-token prediction: what its routers picked.

Usage: torchrun --nproc-per-node N -m tests.trainers.verl.megatron_mtp_worker POLICY FOLDER RUNS

RUNS is JSON, the settings of `make` by the name of each.
"""

import json
import sys
from pathlib import Path

# isort: off
from tests.trainers.verl.megatron_engines import exported, make  # before verl: no GPU

# isort: on
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from verl.workers.config import MtpConfig

import tests.trainers.verl.mtp_bridge  # noqa: F401
from tests.trainers.verl.megatron_worker import SEQUENCES, sum_log_prob
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_engines import old_log_probs, tensordict


def main(policy, folder, runs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, batch = dist.get_rank(), Book(policy, count=SEQUENCES).batch()
    for name, settings in json.loads(runs).items():
        torch.save(run(policy, batch, **settings), Path(folder) / f"{name}-{rank}.pt")
        mpu.destroy_model_parallel()
    dist.destroy_process_group()


def run(policy, batch, **settings):
    """An old-log-prob pass and an update: of each router, the share of rows that it routed as it would by itself."""
    mtp = MtpConfig(enable=True, enable_train=True)
    engine = make(policy, model={"mtp": mtp}, dtype="float32", ranks=2, **settings)
    share = SEQUENCES // mpu.get_data_parallel_world_size()
    first = share * mpu.get_data_parallel_rank()
    td = tensordict({name: values[first : first + share] for name, values in batch.items()}, max_token_len_per_gpu=32)
    native, handles = {}, []
    for name, module in ((name, m) for chunk in engine.module for name, m in chunk.named_modules()):
        if name.endswith(".router"):
            kind = "prediction" if ".mtp." in f".{name}" else "decoder"
            handles.append(module.register_forward_hook(_note(native.setdefault(kind, []))))
    old_log_probs(engine, td)
    with engine.train_mode():
        output = engine.train_batch(td, loss_function=sum_log_prob)
    for handle in handles:
        handle.remove()
    return {
        "native": {kind: torch.cat(shares).mean().item() for kind, shares in native.items()},
        "metrics": output.get("metrics"),
        "weights": exported(engine),
    }


def _note(shares):
    def note(router, args, out):
        logits_RE = args[0].reshape(-1, args[0].shape[-1]).float() @ router.weight.float().T
        own_RE = torch.zeros_like(out[1]).scatter(1, logits_RE.topk(router.topk, dim=-1).indices, True)
        shares.append((own_RE == out[1]).all(-1).float())

    return note


if __name__ == "__main__":
    main(*sys.argv[1:])
